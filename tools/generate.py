"""Continue text with a decoder-only language model, or fill the masks of text with an encoder-only one.

MODEL is any name that `vitkit.load` takes; the config and the vocabulary are in a run's checkpoint. The text is TEXT,
the lines of --input, or standard input. How tokens are chosen is set in the model's config (model.decoding); with any
of --temperature, --top-k, --top-p and --seed, they are sampled.

A continued text is one line; with --n-best there is a line for each continuation (score, tab, text), and an empty line
after those of each input. For a mask there is a line for each candidate (probability, tab, token, tab, the text with
it), and an empty line after each mask.

Examples:
    vitkit generate runs/language_model "Ein Mann"
    vitkit generate best.pth "Ein Mann" --temperature 0.8 --top-k 50 --top-p 0.9 --seed 7 --n-best 3
    echo "Zwei Hunde" | vitkit generate best.pth --greedy
    vitkit generate runs/masked_language_model "Ein <mask> fährt Fahrrad."
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vitkit.errors import ConfigError
from vitkit.tools.common import add_device, add_trust, errors_in_one_line, require_text_model
from vitkit.tools.text_arguments import (
    SAMPLING_OPTIONS,
    add_beams,
    add_sampling,
    add_text,
    model_and_text,
    open_output,
    option_names,
    read_lines,
    report_unknown,
)

if TYPE_CHECKING:
    from vitkit.apps.inference import Continuation, Filling, MaskFiller, TextContinuer
    from vitkit.seq2seq.decoding import DecodingSettings

DECODING_OPTIONS = (*SAMPLING_OPTIONS, "greedy", "beams", "max_length", "min_length")
"""Names of the options that a model that fills masks does not take."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_text(parser, "text to continue, or text with <mask> for each hidden token")
    text = "write the N best continuations of a text (default: 1) or candidates for a mask (default: 5), with scores"
    parser.add_argument("--n-best", type=int, metavar="N", help=text)
    add_sampling(parser)
    text = "choose the most probable token each time, like --temperature 0"
    parser.add_argument("--greedy", action="store_true", help=text)
    add_beams(parser)
    text = "minimum number of tokens to write before the text may end"
    parser.add_argument("--min-length", type=int, metavar="T", help=text)
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
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
    from vitkit.apps.inference import MaskFiller, TextContinuer, load
    from vitkit.logging import setup_logging

    with errors_in_one_line():
        setup_logging()
        weights, texts = model_and_text(args.model, args.text, has_input=bool(args.input))
        loaded = load(args.model, weights, device=args.device, trust=args.trust)
        require_text_model(loaded, args.model, TextContinuer | MaskFiller)
        options = {name: value for name in DECODING_OPTIONS if (value := getattr(args, name)) not in (None, False)}
        write = fill_masks if isinstance(loaded, MaskFiller) else continue_texts
        results = write(loaded, read_lines(texts, args.input), args.n_best, options)
        with open_output(args.out) as output:  # only now, as it empties a file that is there already
            for text in results:
                output.write(text)
        report_unknown(loaded.vocabulary)


def continue_texts(
    model: TextContinuer, lines: Sequence[str], n_best: int | None, options: dict[str, Any]
) -> Iterator[str]:
    """Return the output for each text, which is generated as it is iterated.

    Raises:
        ConfigError: a value is out of range.
    """

    def text_of(continuations: list[Continuation]) -> str:
        if n_best is None:
            return f"{continuations[0]}\n"
        return "".join(f"{c.score:.4f}\t{c.text}\n" for c in continuations) + "\n"

    return map(text_of, model.stream(lines, decoding_settings(model.model.decoding, n_best, options)))


def decoding_settings(defaults: DecodingSettings, n_best: int | None, options: dict[str, Any]) -> DecodingSettings:
    """Return the model's decoding settings, changed by options.

    Raises:
        ConfigError: a value is out of range.
    """
    changes = {name: value for name, value in options.items() if name not in ("greedy", "beams")} | {"n_best": 1}
    if "greedy" in options:
        changes["method"] = "greedy"
    elif changes.keys() & set(SAMPLING_OPTIONS):
        changes["method"] = "sample"
    from vitkit.apps.inference.translator import adapt_to_hypotheses

    settings, count = replace(defaults, **changes), 1 if n_best is None else n_best
    return adapt_to_hypotheses(settings, count, beams=options.get("beams"))


def fill_masks(model: MaskFiller, lines: Sequence[str], n_best: int | None, options: dict[str, Any]) -> Iterator[str]:
    """Return the output for each mask, which is generated as it is iterated.

    Raises:
        ConfigError: an option is for models that continue text, or `n_best` is below 1.
    """
    if options:
        raise ConfigError(
            f"{option_names(options)}: for decoder-only models, and this one fills masks. Use --n-best for the number "
            "of candidates."
        )

    def text_of(candidates: list[Filling]) -> str:
        return "".join(f"{c.probability:.4f}\t{c.token}\t{c.text}\n" for c in candidates) + "\n"

    texts = model.stream(lines, n_best=5 if n_best is None else n_best)
    return (text_of(candidates) for masks in texts for candidates in masks)


if __name__ == "__main__":
    main()
