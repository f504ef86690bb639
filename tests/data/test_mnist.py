"""MNIST's files, and a ViT that trains on its images of one channel."""

import struct

import numpy as np
import pytest

import vitkit
from vitkit.data.loading.splits import build_dataset
from vitkit.errors import DataError


def write_idx(folder, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Write a split in MNIST's format: two zeros, 8 for bytes, the number of axes, the sizes, the bytes."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
        header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        (raw / f"{split}-{kind}-ubyte").write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("t10k", 20)):
        labels = np.arange(count) % 10
        # A digit's images have a bright row of their own, on noise.
        images = rng.integers(0, 60, (count, 28, 28))
        images[np.arange(count), 2 * labels + 4] = 255
        write_idx(tmp_path, split, images, labels)
    return tmp_path


def test_images_have_one_channel_or_three(folder):
    spec = dict(type="MNIST", folder="{root}", split="test")
    gray = build_dataset(spec, str(folder), channels=1)
    sample = gray[13]
    assert len(gray) == 20 and gray.classes == [str(i) for i in range(10)]
    assert sample["image"].shape == (1, 28, 28) and sample["target"]["label"] == 3
    rgb = build_dataset(spec, str(folder))[13]["image"]
    assert rgb.shape == (3, 28, 28) and (rgb[0] == rgb[2]).all() and rgb[0, 10].min() == 255
    assert (rgb[:1].int() * 257 == sample["image"].int()).all()


def test_the_config_trains(folder, tmp_path):
    config = vitkit.load_config("vit_mnist", [f"data.root={folder}", "train.epochs=1", "data.images_per_gpu=20"])
    config["model"]["backbone"].update(d_model=16, depth=1, num_heads=2)
    run = vitkit.train(config, run_dir=tmp_path / "run", device="cpu")
    assert run.history[-1]["top1"] >= 0


def test_196_patches_are_those_of_the_lecture():
    config = vitkit.load_config("vit_mnist")
    model = vitkit.build_model(config["model"], classes=[str(i) for i in range(10)])
    assert model.backbone.pos_embed.shape == (1, 197, 64)


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "labels"])
def test_files_that_are_missing_or_damaged_are_named(folder, damage):
    path = folder / "MNIST" / "raw" / "train-images-idx3-ubyte"
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:5000])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        write_idx(folder, "train", np.zeros((3, 28, 28)), np.array([0, 1, 12]))
    with pytest.raises(DataError, match="data.train: .*MNIST"):
        build_dataset(dict(type="MNIST", folder="{root}"), str(folder), key="data.train")
