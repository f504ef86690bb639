"""A hook that says what the parts of a step take."""

import pytest
from helpers.clocks import Clock

import vitkit
from vitkit.engine.hooks import Hook
from vitkit.engine.hooks.profile import PARTS, StepProfile
from vitkit.errors import ConfigError

TINY = {
    "data.train.num_images": 12, "data.val.num_images": 2, "data.images_per_gpu": 2, "train.epochs": 1,
    "data.train.image_size": 32, "data.val.image_size": 32,
}  # fmt: skip
SLEPT = {"forward": 0.11, "loss": 0.07, "optimizer": 0.09}


class Slow(Hook):
    """Lets parts of each step take a known time of a clock."""

    def __init__(self, clock):
        self.clock = clock

    def during_training(self, run):
        sleep = {part: lambda *_, seconds=seconds: self.clock.sleep(seconds) for part, seconds in SLEPT.items()}
        run.model.register_forward_hook(sleep["forward"])
        run.criterion.register_forward_hook(sleep["loss"])
        run.optimizer.register_step_post_hook(sleep["optimizer"])
        return super().during_training(run)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parts_of_a_step_are_attributed(tmp_path, capsys, monkeypatch, accumulate):
    plain, slow = StepProfile(steps=1, after=1), StepProfile(steps=1, after=1)
    settings = TINY | {"train.accumulate": accumulate}
    vitkit.train("quickstart/detr", run_dir=tmp_path / "plain", device="cpu", hooks=[plain], **settings)
    clock = Clock()
    for module in ("vitkit.engine.step", "vitkit.engine.hooks.profile"):
        monkeypatch.setattr(f"{module}.time", clock)
    vitkit.train("quickstart/detr", run_dir=tmp_path / "slow", device="cpu", hooks=[Slow(clock), slow], **settings)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a step takes ")]
    assert len(lines) == 2 and "(mean of 1): data " in lines[0] and ", backward " in lines[0]
    assert all(seconds > 0 for part, seconds in plain.seconds.items() if part != "other")
    expected = {part: seconds * (1 if part == "optimizer" else accumulate) for part, seconds in SLEPT.items()}
    assert slow.seconds == pytest.approx({part: expected.get(part, 0.0) for part in PARTS})


def test_it_is_named_in_a_config(tmp_path, capsys):
    hook = {"train.hooks": [dict(type="StepProfile", steps=2, after=1)]}
    vitkit.train("quickstart/detr", run_dir=tmp_path / "run", device="cpu", **TINY, **hook)
    assert "(mean of 2): data " in capsys.readouterr().out
    with pytest.raises(ConfigError, match="StepProfile: steps=0, after=5: expected at least 1"):
        StepProfile(steps=0)
