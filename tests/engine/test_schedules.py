"""Learning rates of each step."""

import pytest
import torch
from helpers.toy_training import Blocks
from torch import nn

from vitkit.engine.optimizers import sgd
from vitkit.errors import ConfigError
from vitkit.registry import OPTIMIZERS, SCHEDULES


def curve(spec: dict, *, steps_per_epoch: int = 10, epochs: int = 4) -> list[float]:
    """Return the learning rate of each step, and of the one after the last."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = SCHEDULES.build(spec, optimizer=optimizer, steps_per_epoch=steps_per_epoch, epochs=epochs)
    values = []
    for _ in range(steps_per_epoch * epochs):
        values.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return [*values, schedule.get_last_lr()[0]]


def test_step_schedule_drops_after_the_named_epoch():
    values = curve({"type": "MultiStepLR", "drop_at_epochs": [3]})
    assert values[:30] == [1.0] * 30
    assert values[30:] == pytest.approx([0.1] * 11)


def test_multi_step_schedule_drops_at_its_milestones_also_with_a_warm_up():
    values = curve({"type": "MultiStepLR", "drop_at_epochs": [2, 3], "warmup_steps": 5})
    assert values[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert values[19] == pytest.approx(1.0) and values[20] == pytest.approx(0.1)
    assert values[29] == pytest.approx(0.1) and values[30] == pytest.approx(0.01)


def test_cosine_schedule_is_halved_in_the_middle_and_zero_at_the_end():
    values = curve({"type": "CosineLR"})
    assert values[0] == 1.0 and values[20] == pytest.approx(0.5) and values[40] == pytest.approx(0.0, abs=1e-9)


def test_constant_schedule_only_warms_up():
    assert curve({"type": "ConstantLR"}) == [1.0] * 41
    values = curve({"type": "ConstantLR", "warmup_steps": 4})
    assert values == pytest.approx([0.2, 0.4, 0.6, 0.8] + [1.0] * 37)


FLAT_COSINE = {
    "type": "FlatCosineLR", "warmup_steps": 7, "flat_until_epoch": 2, "cosine_until_epoch": 3.5, "end_factor": 0.5
}  # fmt: skip


def test_flat_cosine_schedule_has_its_four_parts():
    values = curve(FLAT_COSINE)
    assert values[:8] == pytest.approx([(step / 7) ** 2 for step in range(8)])
    assert values[7:21] == [1.0] * 14
    # torch's own cosine, between the same rates, over the 15 steps from 20 to 35
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15, eta_min=0.5)
    for step in range(20, 36):
        assert values[step] == pytest.approx(cosine.get_last_lr()[0])
        optimizer.step()
        cosine.step()
    assert values[35:] == pytest.approx([0.5] * 6) and values[34] > 0.5


def test_flat_cosine_schedule_resumes_in_every_part_and_scales_each_group():
    def built() -> tuple:
        groups = [{"params": nn.Parameter(torch.zeros(1)), "lr": lr} for lr in (1.0, 0.1)]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        return optimizer, SCHEDULES.build(FLAT_COSINE, optimizer=optimizer, steps_per_epoch=10, epochs=4)

    def steps(optimizer, schedule, number: int) -> list:
        rates = []
        for _ in range(number):
            rates.append(schedule.get_last_lr())
            optimizer.step()
            schedule.step()
        return rates

    whole = steps(*built(), 40)
    assert whole[35] == pytest.approx([0.5, 0.05])
    for at in (0, 3, 7, 15, 20, 28, 35, 39):
        optimizer, schedule = built()
        before = steps(optimizer, schedule, at)
        again, resumed = built()
        again.load_state_dict(optimizer.state_dict())
        resumed.load_state_dict(schedule.state_dict())
        assert before + steps(again, resumed, 40 - at) == whole


def test_flat_cosine_schedule_without_an_end_reaches_it_with_the_run():
    values = curve({"type": "FlatCosineLR", "flat_until_epoch": 2, "end_factor": 0.0})
    assert values[0] == 1.0 and values[30] == pytest.approx(0.5) and values[40] == pytest.approx(0.0, abs=1e-9)


def test_flat_part_can_be_a_share_of_the_run():
    assert curve({"type": "FlatCosineLR", "flat_until_share": 0.5}) == curve(
        {"type": "FlatCosineLR", "flat_until_epoch": 2}
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(flat_until_share=0.5), "got flat_until_epoch=2 and flat_until_share=0.5; expected one of them"),
        (dict(warmup_steps=21), "the warm-up ends at step 21, flat_until_epoch=2 is step 20"),
        (dict(flat_until_epoch=3.5), "flat_until_epoch=3.5 is step 35, cosine_until_epoch=3.5 is step 35"),
        (dict(cosine_until_epoch=5), "cosine_until_epoch=5 is step 50, and the run has 40 steps; expected this order"),
    ],
)
def test_parts_of_a_flat_cosine_schedule_must_follow_each_other(changed, message):
    with pytest.raises(ConfigError, match=message):
        curve(FLAT_COSINE | changed)


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan")])
def test_share_of_a_flat_part_is_checked(share):
    with pytest.raises(ConfigError, match=f"^schedule: flat_until_share={share:g}: expected a fraction of the run"):
        curve({"type": "FlatCosineLR", "flat_until_share": share})


def test_share_of_a_run_of_few_steps_leaves_one_for_the_cosine():
    spec = {"type": "FlatCosineLR", "flat_until_share": 0.9, "end_factor": 0.0}
    for steps in (1, 2, 4):
        assert curve(spec, steps_per_epoch=steps, epochs=1) == pytest.approx([1.0] * steps + [0.0], abs=1e-9)


def test_error_of_a_run_shorter_than_its_warm_up_names_the_share_and_the_remedy():
    spec = {"type": "FlatCosineLR", "flat_until_share": 0.6, "warmup_steps": 20}
    with pytest.raises(
        ConfigError,
        match=r"^schedule: the warm-up ends at step 20, flat_until_share=0.6 is step 6, .* a shorter warm-up",
    ):
        curve(spec, epochs=1)


@pytest.mark.parametrize("epochs", [1, 2, 4])
def test_warm_up_of_a_share_of_the_run_follows_its_epochs(epochs):
    for spec in ({"type": "FlatCosineLR", "flat_until_share": 0.6}, {"type": "CosineLR"}):
        by_share = curve(spec | {"warmup_share": 0.1}, epochs=epochs)
        assert by_share == pytest.approx(curve(spec | {"warmup_steps": epochs}, epochs=epochs))  # of 10 steps each


@pytest.mark.parametrize("share", [-0.1, 1, float("nan")])
def test_share_of_a_warm_up_is_checked(share):
    with pytest.raises(ConfigError, match=f"warmup_share={share:g}; expected at least 0, and a fraction"):
        curve({"type": "CosineLR", "warmup_share": share})


def test_poly_schedule_follows_its_power():
    values = curve({"type": "PolyLR", "power": 0.9})
    assert values[20] == pytest.approx(0.5**0.9) and values[40] == pytest.approx(0.0, abs=1e-9)


def test_two_warm_ups_freeze_the_backbone_and_then_raise_its_learning_rate():
    model = Blocks()
    optimizer = sgd(model, lr=1.0, layer_decay=1.0)
    schedule = SCHEDULES.resolve("TwoStageWarmupPolyLR")[0](
        optimizer, 5, epochs=2, warmup_steps=2, backbone_warmup_steps=4, power=1.0
    )
    by_part = {}
    for _ in range(11):
        for group in optimizer.param_groups:
            by_part.setdefault(group.get("part"), []).append(group["lr"])
        optimizer.step()
        schedule.step()
    assert by_part[None] == pytest.approx([0, 0.5, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0])
    assert by_part["backbone"] == pytest.approx([0, 0, 0, 1 / 4, 2 / 4, 3 / 4, 1, 3 / 4, 2 / 4, 1 / 4, 0])


@pytest.mark.parametrize("warmups", [(2, 0), (0, 2), (0, 0)])
def test_each_of_two_warm_ups_may_be_left_out(warmups):
    optimizer = sgd(Blocks(), lr=1.0, layer_decay=1.0)
    schedule = SCHEDULES.resolve("TwoStageWarmupPolyLR")[0](
        optimizer, 4, epochs=1, warmup_steps=warmups[0], backbone_warmup_steps=warmups[1], power=1.0
    )
    rates = {group.get("part"): [group["lr"]] for group in optimizer.param_groups}
    for _ in range(4):
        optimizer.step()
        schedule.step()
        for group in optimizer.param_groups:
            rates[group.get("part")].append(group["lr"])
    expected = {(2, 0): [0, 0, 1, 1 / 2, 0], (0, 2): [0, 1 / 2, 1, 1 / 2, 0], (0, 0): [1, 3 / 4, 1 / 2, 1 / 4, 0]}
    assert rates["backbone"] == pytest.approx(expected[warmups])


def test_two_warm_ups_need_backbone_groups_and_steps():
    schedule = SCHEDULES.resolve("TwoStageWarmupPolyLR")[0]
    with pytest.raises(ConfigError, match="TwoStageWarmupPolyLR: the optimizer has no groups of the backbone's"):
        schedule(sgd(Blocks(), lr=1.0), 100, epochs=1)
    optimizer = sgd(Blocks(), lr=1.0, layer_decay=1.0)
    with pytest.raises(ConfigError, match="warmup_steps=500 and backbone_warmup_steps=1000: .* the run's 100 steps"):
        schedule(optimizer, 100, epochs=1)


def test_cosine_schedule_ends_at_a_fraction_of_every_groups_learning_rate():
    optimizer = torch.optim.SGD([{"params": nn.Parameter(torch.zeros(1)), "lr": lr} for lr in (1.0, 0.1)], lr=1.0)
    spec = {"type": "CosineLR", "end_factor": 0.2, "warmup_epochs": 0.5}
    schedule = SCHEDULES.build(spec, optimizer=optimizer, steps_per_epoch=10, epochs=4)
    values = []
    for _ in range(40):
        values.append(schedule.get_last_lr())
        optimizer.step()
        schedule.step()
    assert values[0] == pytest.approx([1 / 6, 1 / 60]) and values[5] == pytest.approx([1.0, 0.1])
    assert schedule.get_last_lr() == pytest.approx([0.2, 0.02])


def test_warm_up_is_given_either_in_steps_or_in_epochs():
    with pytest.raises(ConfigError, match="warmup_steps=5, warmup_epochs=1, warmup_share=0; expected one of them"):
        curve({"type": "CosineLR", "warmup_steps": 5, "warmup_epochs": 1})
    with pytest.raises(ConfigError, match="warmup_steps=-1, warmup_epochs=0, warmup_share=0; expected at least 0"):
        curve({"type": "CosineLR", "warmup_steps": -1})
    assert curve({"type": "MultiStepLR", "drop_at_epochs": [2], "warmup_epochs": 0.5})[:6] == pytest.approx(
        curve({"type": "MultiStepLR", "drop_at_epochs": [2], "warmup_steps": 5})[:6]
    )


def test_learning_rate_may_drop_within_an_epoch():
    values = curve({"type": "MultiStepLR", "drop_at_epochs": [1.26, 3.5]})
    assert values[:13] == [1.0] * 13 and values[13:35] == pytest.approx([0.1] * 22)
    assert values[35:] == pytest.approx([0.01] * 6)
    # The published drops of Mask2Former, for 368,750 steps in 50 epochs, to one part in a thousand.
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    spec = {"type": "MultiStepLR", "drop_at_epochs": [44.44, 48.15]}
    schedule = SCHEDULES.build(spec, optimizer=optimizer, steps_per_epoch=7375, epochs=50)
    assert sorted(schedule.milestones) == pytest.approx([327_778, 355_092], rel=1e-3)


def test_learning_rate_rises_and_falls_as_in_the_paper():
    d_model, warmup, lr = 512, 40, (512 * 40) ** -0.5
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    spec = dict(type="InverseSqrtLR", warmup_steps=warmup)
    schedule = SCHEDULES.build(spec, optimizer=optimizer, steps_per_epoch=10, epochs=20)
    for step in range(1, 200):
        published = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert schedule.get_last_lr()[0] == pytest.approx(published)
        optimizer.step()
        schedule.step()


def test_warm_up_is_required_and_may_be_given_in_epochs():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    spec = dict(type="InverseSqrtLR", warmup_epochs=2)
    schedule = SCHEDULES.build(spec, optimizer=optimizer, steps_per_epoch=10, epochs=20)
    assert schedule.get_last_lr() == [pytest.approx(1 / 20)]
    with pytest.raises(ConfigError, match="^schedule: warmup_steps=0: expected at least 1"):
        SCHEDULES.build("InverseSqrtLR", optimizer=optimizer, steps_per_epoch=10, epochs=20)


def test_optimizer_accepts_the_settings_of_the_paper():
    spec = dict(type="AdamW", lr=7e-4, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0)
    (group,) = OPTIMIZERS.build(spec, model=nn.Linear(2, 2)).param_groups
    assert group["betas"] == (0.9, 0.98) and group["eps"] == 1e-9


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "CosineLR", "warmup_steps": 21},
        {"type": "InverseSqrtLR", "warmup_epochs": 2.1},
        {"type": "ConstantLR", "warmup_steps": 200},
        {"type": "FlatCosineLR", "warmup_steps": 21, "flat_until_epoch": 3},
    ],
    ids=lambda spec: spec["type"],
)
def test_warm_up_of_more_than_half_of_the_run_is_said(spec, caplog):
    curve(spec)
    count = spec.get("warmup_steps", 21)
    assert f"schedule: the warm-up has {count} of the run's 40 steps. Shorten it" in caplog.text
    caplog.clear()
    curve({"type": "CosineLR", "warmup_steps": 20})
    assert not caplog.text
