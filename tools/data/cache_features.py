"""Compute a frozen backbone's features of all images once, so that a captioner trains without the backbone.

Training and validation then read exactly the numbers that the backbone computes for the images. No transform may be
random: if a config augments its images, override its transforms as in the examples.

Examples:
    vitkit data cache-features configs/caption_sat_soft_flickr8k.py \\
        data.train.transforms=ClassificationEvalTransforms --out data/flickr8k/features
    vitkit data cache-features runs/caption_sat_soft_flickr8k data.train.transforms=ClassificationEvalTransforms
    vitkit data cache-features configs/caption_sat_soft_flickr8k.py runs/others/best.pth \\
        data.train.transforms=ClassificationEvalTransforms
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.errors import ConfigError
from vitkit.tools.common import add_batch_size, add_device, add_model, add_trust, errors_in_one_line, sort_model

if TYPE_CHECKING:
    from vitkit.data.datasets.captions import CaptionDataset
    from vitkit.seq2seq.captioner import Captioner


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    text = "folder to write (default: features)"
    parser.add_argument("--out", type=Path, default=Path("features"), help=text)
    add_batch_size(parser, default=32)
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    sort_model(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.inference import find_model
    from vitkit.logging import setup_logging

    with errors_in_one_line():
        setup_logging()
        found = find_model(args.model, args.weights, overrides=args.overrides, trust=args.trust)
        changes = cache_features(found.config, found.weights, args.out, batch_size=args.batch_size, device=args.device)
        overrides = shlex.join([*args.overrides, *changes])
        print(f"To train on them, give vitkit train the overrides\n    {overrides}")


def cache_features(
    config: Mapping[str, Any], weights: str | Path | None, out: Path, *, batch_size: int, device: str
) -> list[str]:
    """Write the features of the training and validation images; return the overrides with which a run uses them.

    Args:
        weights: None: the pretrained weights of the config's backbone.
        out: the folder to write.
    Raises:
        ConfigError: the model is not a captioner with a frozen backbone, or transforms are random.
    """
    from vitkit import load_weights
    from vitkit.data.datasets.image_features import write_features
    from vitkit.data.loading.loader import DataSettings
    from vitkit.engine.settings import require

    require(config, "model", "data.train", "data.val")
    data = DataSettings(**config["data"])
    datasets = {name: data.dataset(name) for name in ("train", "val")}
    model = build_captioner(config, datasets["train"])
    if weights is not None:
        print(load_weights(model, weights))
    else:
        model.load_pretrained()
    model.to(device)
    overrides = []
    for name, dataset in datasets.items():
        dataset.use_vocabularies_of(datasets["train"])
        check_not_random(dataset, f"data.{name}")
        path = out / f"{name}.npy"
        settings = DataSettings(val_images_per_gpu=batch_size, num_workers=data.num_workers)
        features = model.feature_maps(settings.val_loader(dataset), device)
        written = write_features(path, features, dataset, weights_key=model.weights_key())
        print(f"{path}: {' x '.join(map(str, written['shape']))}, {path.stat().st_size / 2**20:.1f} MiB")
        overrides.append(f"data.{name}.features={path}")
    return overrides


def build_captioner(config: Mapping[str, Any], dataset: Any) -> Captioner:
    """Build the config's captioner.

    Raises:
        ConfigError: the model is not a captioner with a frozen backbone.
    """
    from vitkit import build_model
    from vitkit.data.datasets.captions import CaptionDataset
    from vitkit.seq2seq.captioner import Captioner
    from vitkit.seq2seq.vocabulary import vocabularies_of

    if not isinstance(dataset, CaptionDataset):
        raise ConfigError(f"data.train: {type(dataset).__name__} has no captions; features are cached for captioners.")
    model = build_model(config["model"], vocabularies=vocabularies_of(dataset))
    if not isinstance(model, Captioner) or not model.freeze_backbone:
        raise ConfigError(
            f"model: {type(model).__name__} is not a captioner with a frozen backbone, so its features change while it "
            "trains. Set model.freeze_backbone=True."
        )
    return model


def check_not_random(dataset: CaptionDataset, where: str) -> None:
    """Check that the features of an image are always the same.

    Raises:
        ConfigError: the transforms are random, or features are already set.
    """
    import torch

    if dataset.features is not None:
        raise ConfigError(f"{where}.features={dataset.features.path}: leave it out here, as the images are needed.")
    # Several seeds are tried, since a random flip often gives the same image twice.
    images = [dataset[(0, seed)]["image"] for seed in range(12)]
    if not all(torch.equal(image, images[0]) for image in images):
        raise ConfigError(
            f"{where}.transforms: they draw random numbers, so an image has no fixed features. Set {where}.transforms "
            "to ClassificationEvalTransforms."
        )


if __name__ == "__main__":
    main()
