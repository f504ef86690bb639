"""Files of cached image features, and folders of them (`data.cache_features`)."""

import contextlib
import io
import random
from functools import cache
from pathlib import Path

import numpy as np
import torch
from fuzz.formats import Format
from fuzz.mutate import mutate_bytes, mutate_json
from fuzz.world import read_json

from vitkit.data.datasets.captions import CocoCaptions
from vitkit.data.datasets.image_features import write_features
from vitkit.data.loading.settings import DataSettings
from vitkit.engine.feature_cache import cache_features
from vitkit.errors import DataError
from vitkit.registry import MODELS
from vitkit.seq2seq.captioner import Captioner


def _write_file(rng: random.Random, folder: Path, world: Path) -> None:
    dataset = CocoCaptions(str(world / "images"), str(world / "captions.json"), min_count=1)
    path = folder / "fuzzed.npy"
    write_features(path, [torch.arange(3 * 8.0).view(3, 2, 2, 2)], dataset, weights_key=7)
    if rng.random() < 0.4:
        path.with_suffix(".json").write_bytes(mutate_json(read_json(path.with_suffix(".json")), rng))
    elif rng.random() < 0.6:
        path.write_bytes(mutate_bytes(path.read_bytes(), rng))
    else:
        shape = rng.choice([(3, 2, 2, 2), (2, 2, 2, 2), (3,), ()])
        np.save(path, np.zeros(shape, rng.choice(["<f4", ">f4", "<f8", "|b1", "<i4"])))


def check_file(folder: Path, world: Path) -> None:
    """Check that each image has features of the same shape as in the unchanged file."""
    files = {"features": str(folder / "fuzzed.npy"), "min_count": 1}
    dataset = CocoCaptions(str(world / "images"), str(world / "captions.json"), **files)
    for k in range(len(dataset)):
        features = dataset[(k, k)]["features"]
        assert features.dtype == torch.float32 and features.shape == (2, 2, 2)


def _dataset(world: Path) -> CocoCaptions:
    size = dict(type="ClassificationEvalTransforms", size=32)
    return CocoCaptions(str(world / "images"), str(world / "captions.json"), transforms=size, min_count=1)


@cache
def _model() -> Captioner:
    """Return a small captioner with a frozen backbone; the same in every process."""
    torch.manual_seed(0)
    sizes = dict(d_model=16, num_heads=2, d_ffn=32, num_encoder_layers=1, num_decoder_layers=1)
    backbone = dict(type="resnet18", base_channels=8, pretrained=False, out_features=["res3"])
    spec = dict(type="TransformerCaptioner", **sizes, backbone=backbone, target_size=30, freeze_backbone=True)
    return MODELS.build(spec).eval()


def _cached(world: Path, folder: Path) -> CocoCaptions:
    """Return the dataset with features from a folder, as a run reads them."""
    dataset = _dataset(world)
    settings = DataSettings(cache_features=str(folder), images_per_gpu=3, num_workers=0)
    cache_features(_model(), {"train": dataset}, settings, torch.device("cpu"))
    return dataset


def _write_folder(rng: random.Random, folder: Path, world: Path) -> None:
    """Write a folder of features of which a file is changed, missing or of another run."""
    with contextlib.redirect_stdout(io.StringIO()):
        _cached(world, folder / "maps")
    array, description = folder / "maps" / "train.npy", folder / "maps" / "train.json"
    action = rng.choice(["description", "description", "header", "flip", "short", "missing"])
    if action == "description":
        description.write_bytes(mutate_json(read_json(description), rng))
    elif action in ("header", "flip"):
        data = bytearray(array.read_bytes())
        data[rng.randrange(128 if action == "header" else len(data))] = rng.randrange(256)
        array.write_bytes(data)
    elif action == "short":
        array.write_bytes(array.read_bytes()[: rng.randrange(array.stat().st_size)])
    else:
        rng.choice([array, description]).unlink()


def check_folder(folder: Path, world: Path) -> None:
    """Check that training gets the features of its images, computed again if those in the folder are not whole."""
    images = _dataset(world)
    dataset = _cached(world, folder / "maps")
    for k in range(len(dataset)):
        image = images[(k, k)]["image"][None]
        with torch.no_grad():
            features = _model().look(image, None).features[0]
        assert torch.allclose(dataset[(k, k)]["features"], features, atol=1e-5)


def _write(rng: random.Random, folder: Path, world: Path) -> None:
    (_write_file if rng.random() < 0.6 else _write_folder)(rng, folder, world)


def check(folder: Path, world: Path) -> None:
    """Check a file or a folder of features."""
    (check_folder if (folder / "maps").exists() else check_file)(folder, world)


FORMATS = [Format("features", _write, check, DataError, 2, lambda *_: _model())]
