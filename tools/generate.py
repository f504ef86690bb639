"""Continue text with a decoder-only language model, or fill the masks of text with an encoder-only one.

MODEL is any name that `vitkit.load` takes; the config and the vocabulary are in a run's checkpoint. The text is TEXT,
the lines of --input, or standard input. How tokens are chosen is set in the model's config (model.decoding); with any
of --temperature, --top-k, --top-p and --seed, they are sampled.

A continued text is one line; with --n-best there is a line for each continuation (score, tab, text), and an empty line
after those of each input. For a mask there is a line for each candidate (probability, tab, token, tab, the text with
it), and an empty line after each mask.

Examples:
    python tools/generate.py runs/language_model "Ein Mann"
    python tools/generate.py best.pth "Ein Mann" --temperature 0.8 --top-k 50 --top-p 0.9 --seed 7 --n-best 3
    echo "Zwei Hunde" | python tools/generate.py best.pth --greedy
    python tools/generate.py runs/masked_language_model "Ein <mask> fährt Fahrrad."
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

from vitkit.errors import ConfigError
from vitkit.inference import MaskFiller, TextContinuer, load
from vitkit.logging import setup_logging
from vitkit.seq2seq.decoding import DecodingSettings
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

DECODING_OPTIONS = (*SAMPLING_OPTIONS, "greedy", "beams", "max_length", "min_length")
"""Names of the options that a model that fills masks does not take."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument(
        "text", nargs="*", metavar="TEXT", help="text to continue, or text with <mask> for each hidden token"
    )
    parser.add_argument("--weights", help="the weights of a config: a checkpoint, or the folder of a run")
    add_lines(parser)
    parser.add_argument(
        "--n-best",
        type=int,
        metavar="N",
        help="continuations of a text (default: 1) or candidates for a mask (default: 5)",
    )
    add_sampling(parser)
    parser.add_argument(
        "--greedy", action="store_true", help="choose the most probable token each time, like --temperature 0"
    )
    parser.add_argument("--beams", type=int, metavar="N", help="beam search with N beams")
    parser.add_argument("--max-length", type=int, metavar="T", help="maximum number of tokens to write")
    parser.add_argument(
        "--min-length", type=int, metavar="T", help="minimum number of tokens to write before the text may end"
    )
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    check_lines(parser, args)
    if args.temperature == 0:
        args.greedy, args.temperature = True, None
    drawn = [option_names([name]) for name in SAMPLING_OPTIONS if getattr(args, name) is not None]
    ways = [name for name, chosen in (("--greedy", args.greedy), ("--beams", args.beams is not None)) if chosen]
    if len(ways) + bool(drawn) > 1:
        parser.error(f"{', '.join([*ways, *drawn])}: give one way to choose tokens")
    if args.greedy and (args.n_best or 1) > 1:
        parser.error(f"--n-best {args.n_best}: the most probable tokens make one text; use --beams or --temperature")
    if args.beams is not None and (args.n_best or 1) > args.beams:
        parser.error(f"--n-best {args.n_best}: {args.beams} beams find no more texts; use --beams {args.n_best}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        setup_logging()
        run(args)


def run(args: argparse.Namespace) -> None:
    """Continue or fill the lines of the input, and write the results.

    Raises:
        ConfigError: the model is not a language model, or an option does not apply to its kind.
    """
    loaded = load(args.model, args.weights, device=args.device, trust=args.trust)
    require_text_model(loaded, args.model, TextContinuer | MaskFiller)
    write = filled if isinstance(loaded, MaskFiller) else continued
    with opened(args.output) as output:
        for text in write(loaded, read_lines(args), args):
            output.write(text)
    report_unknown(loaded.vocabulary)


def continued(model: TextContinuer, lines: Sequence[str], args: argparse.Namespace) -> Iterator[str]:
    """Yield the output for each text."""
    for continuations in model.stream(lines, decoding_settings(model.model.decoding, args)):
        if args.n_best is None:
            yield f"{continuations[0]}\n"
        else:
            yield "".join(f"{c.score:.4f}\t{c.text}\n" for c in continuations) + "\n"


def decoding_settings(defaults: DecodingSettings, args: argparse.Namespace) -> DecodingSettings:
    """Return the model's decoding settings, changed by the arguments.

    Raises:
        ConfigError: a value is out of range.
    """
    names = (*SAMPLING_OPTIONS, "max_length", "min_length")
    changes = {name: value for name in names if (value := getattr(args, name)) is not None} | {"n_best": 1}
    if args.greedy:
        changes["method"] = "greedy"
    elif changes.keys() & set(SAMPLING_OPTIONS):
        changes["method"] = "sample"
    return replace(defaults, **changes).with_hypotheses(1 if args.n_best is None else args.n_best, beams=args.beams)


def filled(model: MaskFiller, lines: Sequence[str], args: argparse.Namespace) -> Iterator[str]:
    """Yield the output for each mask.

    Raises:
        ConfigError: an option is for models that continue text.
    """
    wrong = [name for name in DECODING_OPTIONS if getattr(args, name) not in (None, False)]
    if wrong:
        raise ConfigError(
            f"{option_names(wrong)}: for decoder-only models, and this one fills masks. Use --n-best for the number "
            "of candidates."
        )
    for masks in model.stream(lines, n_best=5 if args.n_best is None else args.n_best):
        for candidates in masks:
            yield "".join(f"{c.probability:.4f}\t{c.token}\t{c.text}\n" for c in candidates) + "\n"


if __name__ == "__main__":
    main()
