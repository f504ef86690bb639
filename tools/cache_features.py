"""Compute a frozen backbone's features of all images once, so that a captioner trains without the backbone.

Training and validation then read exactly the numbers that the backbone computes for the images. No transform may be
random: if a config augments its images, override its transforms as in the examples.

Examples:
    python tools/cache_features.py configs/caption_sat_soft_flickr8k.py \\
        data.train.transforms=ClassificationEvalTransforms --out data/flickr8k/features
    python tools/cache_features.py runs/caption_sat_soft_flickr8k data.train.transforms=ClassificationEvalTransforms
    python tools/cache_features.py configs/caption_sat_soft_flickr8k.py --checkpoint runs/others \\
        data.train.transforms=ClassificationEvalTransforms
"""

import argparse
import shlex
from pathlib import Path
from typing import Any

import torch

from vitkit import build_model, load_weights
from vitkit.config import Config
from vitkit.data.datasets.captions import CaptionDataset
from vitkit.data.datasets.image_features import write_features
from vitkit.data.loading.loader import DataSettings
from vitkit.engine.settings import require
from vitkit.errors import ConfigError
from vitkit.inference import find_model, find_weights
from vitkit.logging import setup_logging
from vitkit.seq2seq.captioner import Captioner
from vitkit.seq2seq.vocabulary import vocabularies_of
from vitkit.tools.common import MODEL_HELP, add_device, add_trust, errors_in_one_line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a captioner with freeze_backbone: {MODEL_HELP}")
    parser.add_argument("overrides", nargs="*", help="key.sub=value, such as data.root=data/flickr8k")
    parser.add_argument(
        "--checkpoint",
        help="a run or its checkpoint, used instead of the model's own or the backbone's pretrained weights",
    )
    parser.add_argument("--out", type=Path, default=Path("features"), help="folder to write (default: features)")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a batch (default: 32)")
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    if args.batch_size < 1:
        parser.error(f"--batch-size {args.batch_size}: expected at least 1")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        setup_logging()
        config, weights = find_model(args.model, overrides=args.overrides, trust=args.trust)
        if args.checkpoint:
            weights = find_weights(args.checkpoint, trust=args.trust)
        run(config, weights, args)


def run(config: Config, weights: str | Path | None, args: argparse.Namespace) -> None:
    """Write the features of both datasets, and print the overrides with which a run uses them."""
    require(config, "model", "data.train", "data.val")
    data = DataSettings(**config["data"])
    datasets = {name: data.dataset(name) for name in ("train", "val")}
    model = build_captioner(config, datasets["train"])
    if weights is not None:
        print(load_weights(model, weights))
    else:
        model.load_pretrained()
    model.to(args.device)
    overrides = list(args.overrides)
    for name, dataset in datasets.items():
        dataset.use_vocabularies_of(datasets["train"])
        check_not_random(dataset, f"data.{name}")
        path = args.out / f"{name}.npy"
        settings = DataSettings(val_images_per_gpu=args.batch_size, num_workers=data.num_workers)
        loader = settings.val_loader(dataset)
        written = write_features(
            path, model.feature_maps(loader, args.device), dataset, weights_key=model.weights_key()
        )
        print(f"{path}: {' x '.join(map(str, written['shape']))}, {path.stat().st_size / 2**20:.1f} MiB")
        overrides.append(f"data.{name}.features={path}")
    print(f"To train on them, give tools/train.py the overrides\n    {shlex.join(overrides)}")


def build_captioner(config: Config, dataset: Any) -> Captioner:
    """Build the config's captioner.

    Raises:
        ConfigError: the model is not a captioner with a frozen backbone.
    """
    if not isinstance(dataset, CaptionDataset):
        raise ConfigError(f"data.train: {type(dataset).__name__} has no captions; features are cached for captioners.")
    model = build_model(config["model"], vocabularies=vocabularies_of(dataset))
    if not isinstance(model, Captioner) or not model.freeze_backbone:
        raise ConfigError(
            f"model: {type(model).__name__} is no captioner with a frozen backbone, so that its features change while "
            "it trains. Set model.freeze_backbone=True."
        )
    return model


def check_not_random(dataset: CaptionDataset, where: str) -> None:
    """Check that the features of an image are always the same.

    Raises:
        ConfigError: the transforms are random, or features are already set.
    """
    if dataset.features is not None:
        raise ConfigError(f"{where}.features={dataset.features.path}: leave it out here, the images are needed.")
    # Several seeds are tried, since a random flip often gives the same image twice.
    images = [dataset[(0, seed)]["image"] for seed in range(12)]
    if not all(torch.equal(image, images[0]) for image in images):
        raise ConfigError(
            f"{where}.transforms: they draw random numbers, so an image has no fixed features. Set {where}.transforms "
            "to ClassificationEvalTransforms."
        )


if __name__ == "__main__":
    main()
