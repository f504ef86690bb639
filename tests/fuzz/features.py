"""Files of cached image features."""

import io
import random
from pathlib import Path

import numpy as np
import torch
from fuzz.formats import Format
from fuzz.mutate import mutate_bytes, mutate_json
from fuzz.world import read_json

from vitkit.data.datasets.captions import CocoCaptions
from vitkit.data.datasets.image_features import write_features
from vitkit.errors import DataError


def _write(rng: random.Random, folder: Path, world: Path) -> None:
    dataset = CocoCaptions(str(world / "images"), str(world / "captions.json"), min_count=1)
    path = folder / "fuzzed.npy"
    write_features(path, [torch.arange(3 * 8.0).view(3, 2, 2, 2)], dataset, weights_key=7)
    if rng.random() < 0.4:
        path.with_suffix(".json").write_bytes(mutate_json(read_json(path.with_suffix(".json")), rng))
    elif rng.random() < 0.6:
        path.write_bytes(mutate_bytes(path.read_bytes(), rng))
    else:
        shape, dtype = (
            rng.choice([(3, 2, 2, 2), (2, 2, 2, 2), (3,), ()]),
            rng.choice(["<f4", ">f4", "<f8", "|b1", "<i4"]),
        )
        file = io.BytesIO()
        np.save(file, np.zeros(shape, dtype))
        path.write_bytes(file.getvalue())


def check(folder: Path, world: Path) -> None:
    """Check that each image has features of the same shape as in the unchanged file."""
    files = {"features": str(folder / "fuzzed.npy"), "min_count": 1}
    dataset = CocoCaptions(str(world / "images"), str(world / "captions.json"), **files)
    for k in range(len(dataset)):
        features = dataset[(k, k)]["features"]
        assert features.dtype == torch.float32 and features.shape == (2, 2, 2)


FORMATS = [Format("features", _write, check, DataError, 1)]
