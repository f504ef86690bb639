"""Describe pictures with a trained captioner: pictures or folders of them in, text out.

Examples:
    python tools/caption.py runs/caption_sat_soft_flickr8k street.jpg
    python tools/caption.py configs/quickstart/captioning.py best.pth pictures/ --beams 5 --n-best 3
    python tools/caption.py configs/quickstart/captioning.py best.pth pictures/ --attention drawn

With --attention there is a PNG for each picture: what the model looked at for each word.
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit import build_model, load_weights
from vitkit.checkpoint import read_checkpoint
from vitkit.config import Config
from vitkit.data.loading.collate import collate
from vitkit.data.loading.loader import DataSettings
from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.engine.settings import require
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.inference import find_trained, names_config_alone, pictures_in
from vitkit.logging import setup_logging
from vitkit.ops.image_files import read_image, to_tensor
from vitkit.registry import TRANSFORMS
from vitkit.seq2seq import Captioner, Hypothesis, decode
from vitkit.structures import Sample
from vitkit.tools.common import MODEL_HELP, add_device, add_trust, errors_in_one_line, is_override, unique_names
from vitkit.visualization.attention import draw_word_attention
from vitkit.vocabulary import SPACE, vocabularies_from_json

logger = logging.getLogger("vitkit")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument(
        "pictures",
        nargs="+",
        help="after a config its weights; pictures, folders of them, and overrides (key.sub=value)",
    )
    parser.add_argument(
        "--beams", type=int, metavar="N", help="beam search with N beams; 1: greedy (default: config's)"
    )
    parser.add_argument("--n-best", type=int, default=1, metavar="N", help="captions of each picture, with scores")
    parser.add_argument("--attention", type=Path, metavar="FOLDER", help="draw each word's attention into PNGs here")
    parser.add_argument("--batch-size", type=int, default=16, help="pictures at once (default: 16)")
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    args.overrides = [text for text in args.pictures if is_override(text)]
    pictures = [text for text in args.pictures if text not in args.overrides]
    args.weights = pictures.pop(0) if pictures and names_config_alone(args.model) else None
    args.pictures = [Path(text) for text in pictures]
    if not args.pictures:
        parser.error("no pictures: give files or folders")
    if args.batch_size < 1:
        parser.error(f"--batch-size {args.batch_size}: expected at least 1")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        setup_logging()
        run(*find_trained(args.model, args.weights, overrides=args.overrides, trust=args.trust), args)


def run(config: Config, weights: str | Path, args: argparse.Namespace) -> None:
    """Load the model, and print a line for each picture, or one for each of its best captions."""
    require(config, "model", "data.val")
    paths = find_pictures(args.pictures)
    model = load_captioner(config, weights).to(args.device)
    settings = model.decoding.with_hypotheses(args.n_best, beams=args.beams)
    data = DataSettings(**config["data"])
    transforms = data.val.get("transforms")
    transforms = None if transforms is None else TRANSFORMS.build(transforms)
    unique = list(dict.fromkeys(paths))
    names = dict(zip(unique, unique_names(path.stem for path in unique)))
    for start in range(0, len(paths), args.batch_size):
        batch_paths = paths[start : start + args.batch_size]
        pictures = [
            resize_for_model(read_image(path, "pictures", max_pixels=data.max_image_pixels), transforms)
            for path in batch_paths
        ]
        captions: dict[int, list[Hypothesis]] = {}
        for indices in group_by_size(pictures):
            same_size = [pictures[index] for index in indices]
            inputs = collate([Sample(image=to_tensor(picture), target={}) for picture in same_size])
            inputs = inputs.to(args.device).inputs
            captions |= zip(indices, decode(model, inputs, settings, return_attention=args.attention is not None))
            if args.attention is not None:
                outputs = [args.attention / f"{names[batch_paths[index]]}.png" for index in indices]
                draw_attention(model, inputs, same_size, [captions[index][0] for index in indices], outputs)
        for index, path in enumerate(batch_paths):
            for hypothesis in captions[index]:
                text = model.vocabulary.decode(hypothesis.tokens)
                score = "" if args.n_best == 1 else f"{hypothesis.score:.4f}\t"
                print(f"{path}\t{score}{text}", flush=True)


def find_pictures(paths: Sequence[Path]) -> list[Path]:
    """The files among the paths, and all pictures in the folders among them.

    Raises:
        DataError: a path does not exist, or a folder holds no picture.
    """
    files = []
    for path in paths:
        if not path.exists():
            raise DataError(f"no file or folder '{path}'. Give pictures, or a folder of pictures.")
        files += pictures_in(path) if path.is_dir() else [path]
    return files


def load_captioner(config: Config, checkpoint: str | Path) -> Captioner:
    """The captioner of a config with a checkpoint's weights and vocabulary, in evaluation mode.

    Raises:
        ConfigError: the config is of another kind of model.
        CheckpointError: the checkpoint cannot be read, does not fit, or has no vocabulary.
    """
    vocabularies = vocabularies_from_json(read_checkpoint(checkpoint).get("vocabularies"))
    if "target" not in vocabularies:
        raise CheckpointError(f"{checkpoint}: holds no vocabulary of captions; expected a checkpoint of a run.")
    model = build_model(config["model"], vocabularies=vocabularies)
    if not isinstance(model, Captioner):
        raise ConfigError(f"model: {type(model).__name__} describes no pictures; expected a captioner.")
    load_weights(model, checkpoint)
    return model.eval()


def resize_for_model(picture: np.ndarray, transforms: Any) -> np.ndarray:
    """The picture resized and cropped as in validation."""
    return picture if transforms is None else transforms(AnnotatedImage(picture)).image


def group_by_size(pictures: Sequence[np.ndarray]) -> list[list[int]]:
    """The indices of pictures of one size each: in a padded batch, a caption would depend on the other pictures."""
    indices: dict[tuple[int, ...], list[int]] = {}
    for index, picture in enumerate(pictures):
        indices.setdefault(picture.shape, []).append(index)
    return list(indices.values())


@torch.no_grad()
def draw_attention(
    model: Captioner,
    inputs: Mapping[str, Tensor],
    pictures: Sequence[np.ndarray],
    hypotheses: Sequence[Hypothesis],
    outputs: Sequence[Path],
) -> None:
    """Save a PNG for each picture, as the model saw it."""
    map_size = model.look(inputs["images"], inputs["padding_mask"]).features.shape[-2:]
    for picture, hypothesis, output in zip(pictures, hypotheses, outputs):
        words = [token.replace(SPACE, "") for token in model.vocabulary.token_texts(hypothesis.tokens)]
        if not words:
            logger.warning("%s: not drawn, because the caption is empty", output)
            continue
        draw_word_attention(picture, words, hypothesis.attention.unflatten(1, map_size), output)


if __name__ == "__main__":
    main()
