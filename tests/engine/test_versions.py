"""Runs of every released version are resumed, and their weights used, by this one.

At a release: python tests/engine/test_versions.py writes the runs of this version beside those of the earlier ones,
which are never changed.
"""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import vitkit
from vitkit.apps.visualization.curves import read_log
from vitkit.io.atomic import write_atomically

FOLDER = Path(__file__).parents[1] / "golden" / "versions"
KEPT = ("config.json", "last.pth", "log.jsonl")
RUNS = {
    "detector": (
        "quickstart/dino",
        {
            "model.backbone.base_channels": 4,
            "model.neck": {"out_channels": 16, "num_groups": 4},
            "model.head": {"d_model": 16, "num_heads": 2, "d_ffn": 32},
            "data": {"train": {"num_images": 8}, "val": {"num_images": 4}, "images_per_gpu": 2, "num_workers": 0},
            "train": {"epochs": 1, "reference_batch_size": 2, "ema_decay": 0.9},
        },
    ),
    "translator": (
        "quickstart/translation",
        {
            "model": {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_ffn": 32},
            "data": {"train": {"num_pairs": 100, "vocabulary": {"size": 60}}, "val": {"num_pairs": 20}},
            "train": {"epochs": 1},
        },
    ),
}
STORED = sorted(path for path in FOLDER.glob("*/*") if path.is_dir())


def answers(folder: Path) -> dict[str, list[float]]:
    """Return what the model of a run says, and the losses of one more epoch."""
    model = vitkit.load(folder / "last.pth", device="cpu")
    if folder.name == "detector":
        image = torch.arange(3 * 96 * 96, dtype=torch.int64).mul(7919).remainder(256).view(96, 96, 3)
        said = model(image.to(torch.uint8).numpy(), threshold=0.0).scores.tolist()[:10]
    else:
        said = [model("seventy-two").score]
    # Channels last, oneDNN's AVX2 kernel writes beyond its buffer for the weights' gradient of a 1x1 convolution with
    # stride 2 and fewer than 8 input channels (torch 2.14), which only models as small as these have.
    vitkit.train(resume=folder, device="cpu", train={"epochs": 2, "channels_last": False})
    losses, _ = read_log(folder / "log.jsonl")
    return {"said": said, "losses": list(losses[-1]["losses"].values())}


@pytest.mark.parametrize("stored", STORED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_runs_of_a_released_version_are_used_and_resumed(stored, tmp_path):
    folder = shutil.copytree(stored, tmp_path / stored.name)
    expected = json.loads((folder / "expected.json").read_text())
    found = answers(folder)
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=2e-3), key


def test_this_version_has_runs():
    assert {path.name for path in STORED if path.parent.name == vitkit.__version__} == set(RUNS)


def write() -> None:
    """Write the runs of this version."""
    for name, (config, overrides) in RUNS.items():
        target = FOLDER / vitkit.__version__ / name
        target.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as temporary:
            folder = vitkit.train(config, run_dir=Path(temporary) / name, device="cpu", **overrides).path
            for file in KEPT:
                shutil.copy(folder / file, target)
            text = json.dumps(answers(folder), indent=1)
        write_atomically(target / "expected.json", lambda file, text=text: file.write(text.encode()))


if __name__ == "__main__":
    write()
