"""Translate text with a trained model: text in, text out, a line for each line.

The config and the vocabularies are in the checkpoint. Text is TEXT, the lines of --input, or what comes in by the pipe.

Examples:
    python tools/translate.py runs/translation/best.pth "one hundred twenty-three"
    python tools/translate.py best.pth --input news.en --output news.de --beams 4
    echo "A dog runs." | python tools/translate.py best.pth --n-best 3
    python tools/translate.py best.pth "A man sleeps in a green room." --attention alignment.png
    python tools/translate.py best.pth "A dog runs." --sample --top-p 0.9 --n-best 5 --seed 7
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from vitkit import build_model, load_weights
from vitkit.checkpoint import read_checkpoint
from vitkit.data.text import TextLines, pad_tokens
from vitkit.errors import CheckpointError, ConfigError, DataError, VitkitError, error_line
from vitkit.logging import setup_logging
from vitkit.seq2seq.decoding import DecodingSettings, Hypothesis, decode
from vitkit.structures import EOS, PAD
from vitkit.visualization.text import draw_alignment
from vitkit.vocabulary import Vocabulary, vocabularies_from_json

BATCH = 32
OF_SAMPLING = ("temperature", "top_k", "top_p", "seed")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="weights, config and vocabularies: a run's checkpoint")
    parser.add_argument("text", nargs="*", metavar="TEXT", help="sentences to translate")
    parser.add_argument("--input", type=Path, help="a file with a sentence in each line, plain or gzip")
    parser.add_argument("--output", type=Path, help="where to write (default: to the terminal)")
    parser.add_argument("--beams", type=int, metavar="N", help="beam search with N beams (1: greedy)")
    parser.add_argument("--length-penalty", type=float, metavar="A", help="of beam search; 0 for none")
    parser.add_argument("--n-best", type=int, metavar="N", help="N translations of each line, with their scores")
    parser.add_argument("--max-length", type=int, metavar="T", help="tokens written at most")
    parser.add_argument("--sample", action="store_true", help="draw the tokens by their probability")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="of --sample: below 1, improbable tokens are rarer"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="of --sample: only the K most probable tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="of --sample: only the most probable that make up P")
    parser.add_argument("--seed", type=int, metavar="S", help="of --sample: another one draws other tokens")
    parser.add_argument(
        "--attention", type=Path, metavar="PNG",
        help="draw the alignment matrix of the best translation (of several lines: NAME_1.png and so on)",
    )  # fmt: skip
    parser.add_argument("--max-source", type=int, default=1000, metavar="S", help="tokens of a sentence at most")
    parser.add_argument(
        "--truncate", action="store_true", help="cut sentences over --max-source in place of stopping with an error"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_intermixed_args(argv)
    if args.text and args.input:
        parser.error("give either TEXT or --input FILE")
    if args.max_source < 2:
        parser.error(f"--max-source {args.max_source}: expected at least 2, a token and the end of the sentence")
    if args.sample and args.beams is not None:
        parser.error("--sample and --beams: give one of them")
    if not args.sample and any(getattr(args, name) is not None for name in OF_SAMPLING):
        parser.error(f"{', '.join('--' + name.replace('_', '-') for name in OF_SAMPLING)}: are of --sample, add it")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        setup_logging()
        run(args)
    except VitkitError as error:
        sys.exit(error_line(error))


def run(args: argparse.Namespace) -> None:
    model, vocabularies = load_translator(args.checkpoint)
    model.eval().to(args.device)
    settings = chosen_settings(model.decoding, args)
    lines = read_lines(args)
    source = vocabularies["source"]
    encoded = [encode(line, number, source, args) for number, line in enumerate(lines, start=1)]
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
    output = args.output.open("w", encoding="utf-8") if args.output else sys.stdout
    try:
        for number, hypotheses in translate(model, encoded, settings, attention=args.attention is not None):
            output.write(as_text(hypotheses, vocabularies["target"], args.n_best))
            if args.attention and hypotheses:
                draw(hypotheses[0], encoded[number], vocabularies, numbered(args.attention, number, len(lines)))
    finally:
        if args.output:
            output.close()
    empty = sum(not ids for ids in encoded)
    if empty:
        print(f"{empty} of {len(lines)} lines are empty: so are their translations", file=sys.stderr)
    if source.unknown_count:
        some = ", ".join(f"{token!r} {count}x" for token, count in source.unknown.most_common(10))
        print(f"the model does not know {source.unknown_count} of the characters or words: {some}", file=sys.stderr)


def load_translator(path: Path) -> tuple[nn.Module, dict[str, Vocabulary]]:
    """
    Raises:
        CheckpointError: it is no checkpoint of a model that translates.
    """
    checkpoint = read_checkpoint(path)
    vocabularies = vocabularies_from_json(checkpoint.get("vocabularies") or {})
    if set(vocabularies) != {"source", "target"} or "config" not in checkpoint:
        raise CheckpointError(
            f"{path}: holds no config with vocabularies of two languages; expected a checkpoint that tools/train.py "
            "wrote of a translation model."
        )
    model = build_model(json.loads(checkpoint["config"])["model"], vocabularies=vocabularies)
    load_weights(model, checkpoint)
    return model, vocabularies


def chosen_settings(own: DecodingSettings, args: argparse.Namespace) -> DecodingSettings:
    """The model's own settings, changed by the arguments that are given."""
    given = {name: getattr(args, name) for name in ("length_penalty", "max_length", *OF_SAMPLING)}
    changes = {name: value for name, value in given.items() if value is not None}
    if args.sample:
        changes["method"] = "sample"
    return replace(own, **changes).with_hypotheses(1 if args.n_best is None else args.n_best, beams=args.beams)


def read_lines(args: argparse.Namespace) -> Sequence[str]:
    """
    Raises:
        DataError: there is nothing to read, or it is no UTF-8.
    """
    if args.text:
        for number, text in enumerate(args.text, start=1):
            if any("\ud800" <= character <= "\udfff" for character in text):  # bytes that Python could not decode
                raise DataError(f"TEXT {number}: no UTF-8.")
        return args.text
    if args.input:
        return TextLines(args.input)
    if sys.stdin.isatty():
        raise ConfigError("no text: give TEXT or --input FILE, or send the text by a pipe.")
    lines = []
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            lines.append(line.decode("utf-8").rstrip("\r\n"))
        except UnicodeDecodeError as error:
            raise DataError(f"standard input, line {number}: no UTF-8 ({error.reason}).") from error
    return lines


def encode(line: str, number: int, vocabulary: Vocabulary, args: argparse.Namespace) -> list[int]:
    """Token ids without EOS; none for an empty line.

    Raises:
        DataError: there are too many.
    """
    ids = vocabulary.encode(line)
    if len(ids) < args.max_source:
        return ids
    if not args.truncate:
        raise DataError(
            f"line {number}: {len(ids) + 1} tokens, the end counted; expected at most {args.max_source}. Split the "
            "line, raise --max-source, or let such lines be cut by --truncate."
        )
    print(f"line {number}: cut from {len(ids) + 1} to {args.max_source} tokens", file=sys.stderr)
    return ids[: args.max_source - 1]


def translate(
    model: nn.Module, encoded: Sequence[list[int]], settings: DecodingSettings, *, attention: bool
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """The place and the translations, the best first, of each line in order; none of an empty line."""
    device = next(model.parameters()).device
    for start in range(0, len(encoded), BATCH):
        places = range(start, min(start + BATCH, len(encoded)))
        filled = [place for place in places if encoded[place]]
        found = {}
        if filled:
            source = pad_tokens([torch.tensor([*encoded[place], EOS]) for place in filled]).to(device)
            inputs = {"source": source, "source_padding": source == PAD}
            # Of sampling: rows of another batch draw from streams of their own.
            of_batch = replace(settings, seed=settings.seed + start * settings.n_best)
            found = dict(zip(filled, decode(model, inputs, of_batch, return_attention=attention)))
        for place in places:
            yield place, found.get(place, [])


def as_text(hypotheses: Sequence[Hypothesis], vocabulary: Vocabulary, n_best: int | None) -> str:
    """A line with the best translation; or with n_best a line for each: score, tab, translation, then an empty one."""
    texts = [vocabulary.decode(hypothesis.tokens) for hypothesis in hypotheses]
    if n_best is None:
        return f"{texts[0] if texts else ''}\n"
    return "".join(f"{h.score:.4f}\t{text}\n" for h, text in zip(hypotheses, texts)) + "\n"


def draw(best: Hypothesis, source: list[int], vocabularies: dict[str, Vocabulary], path: Path) -> None:
    if not best.tokens:
        print(f"{path}: not drawn, because the translation is empty", file=sys.stderr)
        return
    source_tokens = vocabularies["source"].token_texts([*source, EOS])
    target_tokens = vocabularies["target"].token_texts(best.tokens)
    draw_alignment(best.attention[:, : len(source_tokens)], source_tokens, target_tokens, path)
    print(f"drew {path}", file=sys.stderr)


def numbered(path: Path, place: int, count: int) -> Path:
    """PNG itself for one line; NAME_3.png for the third of several."""
    return path if count == 1 else path.with_name(f"{path.stem}_{place + 1}{path.suffix}")


if __name__ == "__main__":
    main()
