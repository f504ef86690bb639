"""Translate text with a trained model: text in, text out, line by line.

MODEL is any name that `vitkit.load` takes; the config and the vocabularies are in a run's checkpoint. The text is TEXT,
the lines of --input, or standard input.

Examples:
    python tools/translate.py runs/translation/best.pth "one hundred twenty-three"
    python tools/translate.py best.pth --input news.en --output news.de --beams 4
    echo "A dog runs." | python tools/translate.py best.pth --n-best 3
    python tools/translate.py best.pth "A man sleeps in a green room." --attention alignment.png
    python tools/translate.py best.pth "A dog runs." --sample --top-p 0.9 --n-best 5 --seed 7
    python tools/translate.py hf:Helsinki-NLP/opus-mt-en-de "A dog runs."
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitkit.errors import DataError
from vitkit.explanations.text_drawing import draw_alignment
from vitkit.inference import Translator, load
from vitkit.inference.translator import translate
from vitkit.logging import setup_logging
from vitkit.seq2seq.decoding import DecodingSettings, Hypothesis
from vitkit.seq2seq.vocabulary import Vocabulary
from vitkit.structures import EOS
from vitkit.tools.common import MODEL_HELP, add_device, add_trust, errors_in_one_line, require_text_model
from vitkit.tools.text_arguments import (
    SAMPLING_OPTIONS,
    add_lines,
    add_sampling,
    check_lines,
    opened,
    option_names,
    read_lines,
    report_unknown,
)
from vitkit.words import counted


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("text", nargs="*", metavar="TEXT", help="sentences to translate")
    parser.add_argument("--weights", help="the weights of a config: a checkpoint, or the folder of a run")
    add_lines(parser)
    parser.add_argument("--beams", type=int, metavar="N", help="beam search with N beams (1: greedy)")
    parser.add_argument(
        "--length-penalty", type=float, metavar="A", help="exponent of the length penalty of beam search; 0 for none"
    )
    parser.add_argument(
        "--n-best", type=int, metavar="N", help="print the N best translations of each line, with scores"
    )
    parser.add_argument("--max-length", type=int, metavar="T", help="maximum number of tokens to write")
    parser.add_argument("--sample", action="store_true", help="sample the tokens by their probability")
    add_sampling(parser, when="for --sample: ")
    parser.add_argument(
        "--attention",
        type=Path,
        metavar="PNG",
        help="draw the alignment matrix of the best translation (for several lines: NAME_1.png and so on)",
    )
    parser.add_argument(
        "--max-source", type=int, default=1000, metavar="S", help="maximum tokens of a sentence (default: 1000)"
    )
    parser.add_argument(
        "--truncate", action="store_true", help="truncate sentences longer than --max-source instead of failing"
    )
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    check_lines(parser, args)
    if args.max_source < 2:
        parser.error(f"--max-source {args.max_source}: expected at least 2, a token and the end of the sentence")
    if args.sample and args.beams is not None:
        parser.error("--sample and --beams: give one of them")
    if not args.sample and any(vars(args)[name] is not None for name in SAMPLING_OPTIONS):
        parser.error(f"{option_names(SAMPLING_OPTIONS)}: need --sample")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        setup_logging()
        run(args)


def run(args: argparse.Namespace) -> None:
    """Translate the lines of the input and write them to the output."""
    translator = load(args.model, args.weights, device=args.device, trust=args.trust)
    require_text_model(translator, args.model, Translator)
    model, vocabularies = translator.model, translator.vocabularies
    settings = decoding_settings(model.decoding, args)
    lines = read_lines(args)
    source = vocabularies["source"]
    encoded = [encode(line, number, source, args) for number, line in enumerate(lines, start=1)]
    with opened(args.output) as output:
        for number, hypotheses in translate(model, encoded, settings, attention=args.attention is not None):
            output.write(as_text(hypotheses, vocabularies["target"], args.n_best))
            if args.attention and hypotheses:
                draw(hypotheses[0], encoded[number], vocabularies, numbered(args.attention, number, len(lines)))
    empty = sum(not ids for ids in encoded)
    if empty:
        print(f"{counted(empty, 'lines', 'are', of=len(lines))} empty, and translated as such", file=sys.stderr)
    report_unknown(source)


def decoding_settings(defaults: DecodingSettings, args: argparse.Namespace) -> DecodingSettings:
    """Return the model's decoding settings, changed by the arguments."""
    names = ("length_penalty", "max_length", *SAMPLING_OPTIONS)
    changes = {name: value for name, value in vars(args).items() if name in names and value is not None}
    if args.sample:
        changes["method"] = "sample"
    return replace(defaults, **changes).with_hypotheses(1 if args.n_best is None else args.n_best, beams=args.beams)


def encode(line: str, number: int, vocabulary: Vocabulary, args: argparse.Namespace) -> list[int]:
    """Return the token ids of a line, without EOS; none for an empty line.

    Raises:
        DataError: there are too many tokens.
    """
    ids = vocabulary.encode(line)
    if len(ids) < args.max_source:
        return ids
    if not args.truncate:
        raise DataError(
            f"line {number}: {len(ids) + 1} tokens, the end counted; expected at most {args.max_source}. Split the "
            "line, raise --max-source, or let such lines be cut by --truncate."
        )
    print(f"line {number}: cut from {len(ids) + 1} to {counted(args.max_source, 'tokens')}", file=sys.stderr)
    return ids[: args.max_source - 1]


def as_text(hypotheses: Sequence[Hypothesis], vocabulary: Vocabulary, n_best: int | None) -> str:
    """Return a line with the best translation; with n_best a line for each (score, tab, text), then an empty line."""
    texts = [vocabulary.decode(hypothesis.tokens) for hypothesis in hypotheses]
    if n_best is None:
        return f"{texts[0] if texts else ''}\n"
    return "".join(f"{h.score:.4f}\t{text}\n" for h, text in zip(hypotheses, texts)) + "\n"


def draw(best: Hypothesis, source: list[int], vocabularies: dict[str, Vocabulary], path: Path) -> None:
    """Save a PNG of a translation's attention to its source."""
    if not best.tokens:
        print(f"{path}: not drawn, because the translation is empty", file=sys.stderr)
        return
    source_tokens = vocabularies["source"].token_texts([*source, EOS])
    target_tokens = vocabularies["target"].token_texts(best.tokens)
    draw_alignment(best.attention[:, : len(source_tokens)], source_tokens, target_tokens, path)
    print(f"drew {path}", file=sys.stderr)


def numbered(path: Path, index: int, count: int) -> Path:
    """Return the path of a line's PNG: `path` itself for a single line; NAME_3.png for the third of several."""
    return path if count == 1 else path.with_name(f"{path.stem}_{index + 1}{path.suffix}")


if __name__ == "__main__":
    main()
