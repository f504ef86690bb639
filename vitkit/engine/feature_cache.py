"""Features of a frozen backbone, computed once so that a captioner, or a student, trains without it
(`data.cache_features`)."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from vitkit.data.datasets.image_features import FeatureFile, FeatureSource, write_features
from vitkit.data.loading.samplers import EvalBatches
from vitkit.data.loading.settings import DataSettings
from vitkit.distributed import first_rank_first
from vitkit.errors import ConfigError, DataError
from vitkit.logging import ProgressLines, print_line
from vitkit.protocols.dataset import Dataset
from vitkit.protocols.model import Model


def cache_features(
    model: Model, datasets: Mapping[str, Dataset], data: DataSettings, device: torch.device
) -> dict[str, str]:
    """Make datasets read features from the folder `data.cache_features`; compute those that are missing.

    Training then has exactly the numbers that it would have without. All ranks must call it.

    Args:
        model: on `device`, with the weights that training starts from.
        datasets: the datasets by split, of which the model's `splits_with_features` are used; one that already has
            features keeps them.
    Returns:
        the file with the features of each split.
    Raises:
        ConfigError: the model has no frozen network, transforms are random, or a dataset cannot have features.
        DataError: images have features of different sizes.
    """
    if not model.has_fixed_features:
        raise ConfigError(
            f"data.cache_features: {type(model).__name__} is neither a captioner with a frozen backbone nor learns the "
            "features of a teacher, so its features change while it trains. Set model.freeze_backbone=True, or leave "
            "out data.cache_features."
        )
    files = {}
    for split, dataset in datasets.items():
        if split not in model.splits_with_features:
            continue
        if not isinstance(dataset, FeatureSource):
            raise ConfigError(
                f"data.cache_features: data.{split}, {type(dataset).__name__}, cannot read features. Expected images "
                "with captions, or UnlabeledImages for feature distillation."
            )
        if dataset.features is None:
            path = Path(os.path.abspath(data.cache_features)) / f"{split}.npy"
            # The loader draws a random number, which must not change those of the training.
            with first_rank_first(), torch.random.fork_rng(devices=[]):
                if not _is_current(path, dataset, model):
                    _write(path, dataset, f"data.{split}", model, data, device)
            dataset.features = FeatureFile(path, dataset.images_key(), dataset.transforms_key)
        files[split] = str(dataset.features.path)
    return files


def _is_current(path: Path, dataset: FeatureSource, model: Model) -> bool:
    try:
        features = FeatureFile(path, dataset.images_key(), dataset.transforms_key)
        return features.weights_key == model.weights_key() and len(features.array) == len(dataset)
    except DataError:  # missing, damaged, or from other images or transforms
        return False


def _write(
    path: Path, dataset: FeatureSource, where: str, model: Model, data: DataSettings, device: torch.device
) -> None:
    check_not_random(dataset, where)
    # Not `val_loader`: of several ranks, only this one computes the features of all images.
    batches = EvalBatches(len(dataset), batch_size=data.images_per_gpu)
    loader = data.loader(dataset, batches, training=False)
    maps = _with_progress(model.feature_maps(loader, device), len(loader))
    written = write_features(path, maps, dataset, weights_key=model.weights_key())
    print_line(f"{path}: {' x '.join(map(str, written['shape']))}, {path.stat().st_size / 2**20:.1f} MiB")


def _with_progress(maps: Iterator[Tensor], total: int) -> Iterator[Tensor]:
    progress = ProgressLines(total, "batches of features computed", every=20.0)
    for batch in maps:
        yield batch
        progress.step()


def check_not_random(dataset: FeatureSource, where: str) -> None:
    """Check that the features of an image are always the same.

    Raises:
        ConfigError: the transforms are random.
    """
    # Several seeds are tried, since a random flip often gives the same image twice.
    images = [dataset[(0, seed)]["image"] for seed in range(12)]
    if not all(torch.equal(image, images[0]) for image in images):
        raise ConfigError(
            f"{where}.transforms: they draw random numbers, so an image has no fixed features. Set {where}.transforms "
            "to ClassificationEvalTransforms, or leave out data.cache_features."
        )
