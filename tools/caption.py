"""Describe pictures with a trained captioner: pictures or folders of them in, text out.

Examples:
    python tools/caption.py configs/caption_sat_soft_flickr8k.py runs/caption_sat_soft_flickr8k/best.pth street.jpg
    python tools/caption.py configs/quickstart/captioning.py best.pth pictures/ --beams 5 --n-best 3
    python tools/caption.py configs/quickstart/captioning.py best.pth pictures/ --attention drawn

With --attention there is a PNG for each picture: what the model looked at for each word.
"""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from vitkit import build_model, load_config, load_weights
from vitkit.checkpoint import read_checkpoint
from vitkit.config import Config
from vitkit.data.collate import collate
from vitkit.data.images import read_image, to_tensor
from vitkit.data.loader import DataSettings
from vitkit.engine.settings import require
from vitkit.errors import CheckpointError, ConfigError, DataError, VitkitError, error_line
from vitkit.logging import setup_logging
from vitkit.registry import TRANSFORMS
from vitkit.seq2seq import Captioner, Hypothesis, decode
from vitkit.structures import Batch, Sample
from vitkit.tools.predict import unique_names
from vitkit.visualization.attention import draw_word_attention
from vitkit.vocabulary import SPACE, vocabularies_from_json

logger = logging.getLogger("vitkit")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a config file, or a run's config.json")
    parser.add_argument("checkpoint", help="a run's checkpoint")
    parser.add_argument(
        "pictures", nargs="+", help="pictures, folders of pictures, and overrides of the config (key.sub=value)"
    )
    parser.add_argument(
        "--beams", type=int, metavar="N", help="beam search with N beams; 1: greedy (default: config's)"
    )
    parser.add_argument("--n-best", type=int, default=1, metavar="N", help="captions of each picture, with scores")
    parser.add_argument("--attention", type=Path, metavar="FOLDER", help="draw each word's attention into PNGs here")
    parser.add_argument("--batch-size", type=int, default=16, help="pictures at once (default: 16)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_intermixed_args(argv)
    args.overrides = [text for text in args.pictures if "=" in text and not Path(text).exists()]
    args.pictures = [Path(text) for text in args.pictures if text not in args.overrides]
    if not args.pictures:
        parser.error("no pictures: give files or folders")
    if args.batch_size < 1:
        parser.error(f"--batch-size {args.batch_size}: expected at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        setup_logging()
        run(load_config(args.config, args.overrides), args)
    except VitkitError as error:
        sys.exit(error_line(error))


def run(config: Config, args: argparse.Namespace) -> None:
    """Loads the model, and prints a line for each picture, or one for each of its best captions."""
    require(config, "model", "data.val")
    paths = find_pictures(args.pictures)
    model = load_captioner(config, args.checkpoint).to(args.device)
    settings = model.decoding.with_hypotheses(args.n_best, beams=args.beams)
    transforms = DataSettings(**config["data"]).val.get("transforms")
    transforms = None if transforms is None else TRANSFORMS.build(transforms)
    different = list(dict.fromkeys(paths))
    names = dict(zip(different, unique_names(path.stem for path in different)))
    for start in range(0, len(paths), args.batch_size):
        of_batch = paths[start : start + args.batch_size]
        pictures = [seen_by_model(read_image(path), transforms) for path in of_batch]
        found: dict[int, list[Hypothesis]] = {}
        for places in places_by_size(pictures):
            of_size = [pictures[place] for place in places]
            inputs = batch_of(of_size).to(args.device).inputs
            found |= zip(places, decode(model, inputs, settings, return_attention=args.attention is not None))
            if args.attention is not None:
                outputs = [args.attention / f"{names[of_batch[place]]}.png" for place in places]
                draw_attention(model, inputs, of_size, [found[place][0] for place in places], outputs)
        for place, path in enumerate(of_batch):
            for hypothesis in found[place]:
                print(line_of(path, model.vocabulary.decode(hypothesis.tokens), hypothesis, args.n_best), flush=True)


def find_pictures(places: Sequence[Path]) -> list[Path]:
    """The files given, and all pictures in the folders given, sorted.

    Raises:
        DataError: a place does not exist, or a folder holds no picture.
    """
    found = []
    for place in places:
        if place.is_dir():
            inside = sorted(path for path in place.iterdir() if path.suffix.lower() in IMG_EXTENSIONS)
            if not inside:
                raise DataError(f"folder '{place}' holds no picture ({', '.join(IMG_EXTENSIONS)}).")
            found += inside
        elif place.is_file():
            found.append(place)
        else:
            raise DataError(f"no file or folder '{place}'. Give pictures, or a folder that holds some.")
    return found


def load_captioner(config: Config, checkpoint: str) -> Captioner:
    """
    Raises:
        ConfigError: the config is of another kind of model.
        CheckpointError: the checkpoint cannot be read, does not fit, or has no vocabulary.
    """
    vocabularies = vocabularies_from_json(read_checkpoint(checkpoint).get("vocabularies") or {})
    if "target" not in vocabularies:
        raise CheckpointError(f"{checkpoint}: holds no vocabulary of captions; expected a checkpoint of a run.")
    model = build_model(config["model"], vocabularies=vocabularies)
    if not isinstance(model, Captioner):
        raise ConfigError(f"model: {type(model).__name__} describes no pictures; expected a captioner.")
    load_weights(model, checkpoint)
    return model.eval()


def seen_by_model(picture: np.ndarray, transforms: Any) -> np.ndarray:
    """The picture resized and cropped as in validation."""
    if transforms is None:
        return picture
    return transforms(picture, np.zeros((0, 4), np.float32), np.zeros(0, np.int64)).image


def places_by_size(pictures: Sequence[np.ndarray]) -> list[list[int]]:
    """The places of pictures that have one size: convolutions would see the padding of smaller ones, and a picture's
    caption depend on the others."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, picture in enumerate(pictures):
        places.setdefault(picture.shape, []).append(place)
    return list(places.values())


def batch_of(pictures: Sequence[np.ndarray]) -> Batch:
    return collate([Sample(image=to_tensor(picture), target={}) for picture in pictures])


def line_of(path: Path, text: str, hypothesis: Hypothesis, n_best: int) -> str:
    """Path and caption; of several captions also the score."""
    return f"{path}\t{text}" if n_best == 1 else f"{path}\t{hypothesis.score:.4f}\t{text}"


@torch.no_grad()
def draw_attention(
    model: Captioner,
    inputs: Mapping[str, Tensor],
    pictures: Sequence[np.ndarray],
    hypotheses: Sequence[Hypothesis],
    outputs: Sequence[Path],
) -> None:
    """Saves a PNG for each picture, as the model saw it."""
    map_size = model.look(inputs["images"], inputs["padding_mask"]).features.shape[-2:]
    for picture, hypothesis, output in zip(pictures, hypotheses, outputs):
        words = [token.replace(SPACE, "") for token in model.vocabulary.token_texts(hypothesis.tokens)]
        if not words:
            logger.warning("%s: not drawn, because the caption is empty", output)
            continue
        draw_word_attention(picture, words, hypothesis.attention.unflatten(1, map_size), output)


if __name__ == "__main__":
    main()
