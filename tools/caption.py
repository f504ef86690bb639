"""Describe pictures with a trained captioner: pictures or folders of them in, text out.

Examples:
    python tools/caption.py runs/caption_sat_soft_flickr8k street.jpg
    python tools/caption.py configs/quickstart/captioning.py best.pth pictures/ --beams 5 --n-best 3
    python tools/caption.py configs/quickstart/captioning.py best.pth pictures/ --attention drawn

With --attention, a PNG for each picture shows what the model looked at for each word.
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitkit.data.io.image_files import to_tensor
from vitkit.data.loading.collate import collate
from vitkit.errors import ConfigError, DataError
from vitkit.explanations.drawing import draw_word_attention
from vitkit.inference import Predictor, in_batches, load, names_config_alone, pictures_in
from vitkit.inference.writing import readable, report_unreadable
from vitkit.logging import setup_logging
from vitkit.seq2seq.captioner import Captioner
from vitkit.seq2seq.decoding import Hypothesis, decode
from vitkit.seq2seq.vocabulary import SPACE
from vitkit.structures import Sample
from vitkit.tools.common import MODEL_HELP, add_device, add_trust, errors_in_one_line, is_override
from vitkit.words import unique_names

logger = logging.getLogger("vitkit")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument(
        "pictures", nargs="+", help="the weights of a config; pictures, folders of them, and overrides (key.sub=value)"
    )
    parser.add_argument(
        "--beams", type=int, metavar="N", help="beam search with N beams; 1: greedy (default: the config's)"
    )
    parser.add_argument(
        "--n-best", type=int, default=1, metavar="N", help="print the N best captions, with scores (default: 1)"
    )
    parser.add_argument(
        "--attention", type=Path, metavar="FOLDER", help="draw the attention of each word into PNGs in this folder"
    )
    parser.add_argument("--batch-size", type=int, default=16, help="pictures in a batch (default: 16)")
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
        run(args)


def run(args: argparse.Namespace) -> None:
    """Load the model, and print a line for each picture, or one for each of its best captions."""
    paths = find_pictures(args.pictures)
    predictor = load_captioner(args)
    model = predictor.model
    settings = model.decoding.with_hypotheses(args.n_best, beams=args.beams)
    unique = list(dict.fromkeys(paths))
    names = dict(zip(unique, unique_names(path.stem for path in unique)))
    broken: list[str] = []
    for batch in in_batches(readable(predictor, paths, broken), args.batch_size):
        batch_paths = [Path(name) for name, _ in batch]
        pictures = [predictor.as_evaluated(picture) for _, picture in batch]
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
    report_unreadable(broken, len(paths))


def find_pictures(paths: Sequence[Path]) -> list[Path]:
    """Return the files among the paths, and all pictures in the folders among them.

    Raises:
        DataError: a path does not exist, or a folder holds no picture.
    """
    files = []
    for path in paths:
        if not path.exists():
            raise DataError(f"no file or folder '{path}'. Give pictures, or a folder of pictures.")
        files += pictures_in(path) if path.is_dir() else [path]
    return files


def load_captioner(args: argparse.Namespace) -> Predictor:
    """Load the captioner that the arguments name.

    Raises:
        ConfigError: the model is not a captioner.
        CheckpointError: the checkpoint cannot be read, or does not fit.
    """
    predictor = load(args.model, args.weights, overrides=args.overrides, trust=args.trust, device=args.device)
    if not isinstance(predictor, Predictor) or not isinstance(predictor.model, Captioner):
        raise ConfigError(
            f"{args.model}: {type(predictor.model).__name__} describes no pictures; expected a captioner."
        )
    return predictor


def group_by_size(pictures: Sequence[np.ndarray]) -> list[list[int]]:
    """Group the indices of pictures by size, as in a padded batch a caption would depend on the other pictures."""
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
    """Save a PNG for each picture, with what the model looked at for each word.

    Args:
        inputs: the batch of the pictures.
        pictures: (H, W, 3) uint8 RGB, as the model saw them.
        hypotheses: the caption of each picture, with attention.
        outputs: the path of each PNG.
    """
    map_size = model.look(inputs["images"], inputs["padding_mask"]).features.shape[-2:]
    for picture, hypothesis, output in zip(pictures, hypotheses, outputs):
        words = [token.replace(SPACE, "") for token in model.vocabulary.token_texts(hypothesis.tokens)]
        if not words:
            logger.warning("%s: not drawn, because the caption is empty", output)
            continue
        draw_word_attention(picture, words, hypothesis.attention.unflatten(1, map_size), output)


if __name__ == "__main__":
    main()
