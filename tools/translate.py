"""Translate text with a trained model: text in, text out, line by line.

MODEL is any name that `vitkit.load` takes; the config and the vocabularies are in a run's checkpoint. The text is TEXT,
the lines of --input, or standard input.

Examples:
    vitkit translate runs/translation/best.pth "one hundred twenty-three"
    vitkit translate best.pth --input news.en --out news.de --beams 4
    echo "A dog runs." | vitkit translate best.pth --n-best 3
    vitkit translate best.pth "A man sleeps in a green room." --attention alignment.png
    vitkit translate best.pth "A dog runs." --sample --top-p 0.9 --n-best 5 --seed 7
    vitkit translate hf:Helsinki-NLP/opus-mt-en-de "A dog runs."
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.errors import DataError
from vitkit.text_format import pluralize
from vitkit.tools.common import a_path, add_device, add_trust, errors_in_one_line, require_text_model
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
    from vitkit.apps.inference import Translator
    from vitkit.seq2seq.decoding import DecodingSettings, Hypothesis
    from vitkit.text.vocabulary import Vocabulary


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_text(parser, "sentences to translate")
    add_beams(parser)
    text = "exponent of the length penalty of beam search; 0 for none"
    parser.add_argument("--length-penalty", type=float, metavar="A", help=text)
    text = "write the N best translations of each line, with scores"
    parser.add_argument("--n-best", type=int, metavar="N", help=text)
    parser.add_argument("--sample", action="store_true", help="sample the tokens by their probability")
    add_sampling(parser, when="for --sample: ")
    text = "draw the alignment matrix of the best translation (for several lines: NAME_1.png and so on)"
    parser.add_argument("--attention", type=a_path, metavar="PNG", help=text)
    parser.add_argument("--words", action="store_true", help="for --attention: join subwords to words")
    text = "maximum number of tokens of a sentence (default: 1000)"
    parser.add_argument("--max-source", type=int, default=1000, metavar="S", help=text)
    text = "truncate sentences longer than --max-source instead of failing"
    parser.add_argument("--truncate", action="store_true", help=text)
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    if args.max_source < 2:
        parser.error(f"--max-source {args.max_source}: expected at least 2, a token and the end of the sentence")
    if args.words and args.attention is None:
        parser.error("--words: needs --attention, whose tokens it joins")
    if args.sample and args.beams is not None:
        parser.error("--sample and --beams: give one of them")
    if not args.sample and any(vars(args)[name] is not None for name in SAMPLING_OPTIONS):
        parser.error(f"{option_names(SAMPLING_OPTIONS)}: need --sample")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.apps.inference import Translator, load
    from vitkit.logging import setup_logging

    with errors_in_one_line():
        setup_logging()
        weights, texts = model_and_text(args.model, args.text, has_input=bool(args.input))
        translator = load(args.model, weights, device=args.device, trust=args.trust)
        require_text_model(translator, args.model, Translator)
        names = ("length_penalty", "max_length", *SAMPLING_OPTIONS)
        changes = {name: value for name in names if (value := getattr(args, name)) is not None}
        settings = decoding_settings(
            translator.model.decoding, changes, sample=args.sample, n_best=args.n_best, beams=args.beams
        )
        lines = read_lines(texts, args.input)
        source = translator.vocabularies["source"]
        encoded = [
            encode(line, number, source, max_tokens=args.max_source, truncate=args.truncate)
            for number, line in enumerate(lines, start=1)
        ]
        write_translations(
            translator, encoded, settings, args.out, n_best=args.n_best, attention=args.attention, words=args.words
        )
        if empty := sum(not ids for ids in encoded):
            print(f"{pluralize(empty, 'lines', 'are', of=len(lines))} empty, and translated as such", file=sys.stderr)
        report_unknown(source)


def write_translations(
    translator: Translator,
    encoded: Sequence[list[int]],
    settings: DecodingSettings,
    out: Path | None,
    *,
    n_best: int | None,
    attention: Path | None,
    words: bool = False,
) -> None:
    """Translate lines, write them, and draw what their tokens or words attend to if `attention` is a path."""
    from vitkit.apps.inference.translator import translate

    results = translate(translator.model, encoded, settings, attention=attention is not None)
    first = list(islice(results, 1))  # an error, such as that of a model without attention, must not empty `out`
    with open_output(out) as output:
        for number, hypotheses in chain(first, results):
            output.write(as_text(hypotheses, translator.vocabularies["target"], n_best))
            if attention and hypotheses:
                path = number_path(attention, number, len(encoded))
                draw(hypotheses[0], encoded[number], translator.vocabularies, path, words=words)


def decoding_settings(
    defaults: DecodingSettings, changes: dict[str, float], *, sample: bool, n_best: int | None, beams: int | None
) -> DecodingSettings:
    """Return the model's decoding settings with changes."""
    method = {"method": "sample"} if sample else {}
    from vitkit.apps.inference.translator import adapt_to_hypotheses

    return adapt_to_hypotheses(replace(defaults, **changes, **method), 1 if n_best is None else n_best, beams=beams)


def encode(line: str, number: int, vocabulary: Vocabulary, *, max_tokens: int, truncate: bool) -> list[int]:
    """Return the token ids of a line, without EOS; none for an empty line.

    Raises:
        DataError: there are too many tokens.
    """
    ids = vocabulary.encode(line)
    if len(ids) < max_tokens:
        return ids
    if not truncate:
        raise DataError(
            f"line {number}: {len(ids) + 1} tokens, including the end; expected at most {max_tokens}. Split the line, "
            "raise --max-source, or let such lines be cut by --truncate."
        )
    print(f"line {number}: cut from {len(ids) + 1} to {pluralize(max_tokens, 'tokens')}", file=sys.stderr)
    return ids[: max_tokens - 1]


def as_text(hypotheses: Sequence[Hypothesis], vocabulary: Vocabulary, n_best: int | None) -> str:
    """Return a line with the best translation; with n_best a line for each (score, tab, text), then an empty line."""
    texts = [vocabulary.decode(hypothesis.tokens) for hypothesis in hypotheses]
    if n_best is None:
        return f"{texts[0] if texts else ''}\n"
    return "".join(f"{h.score:.4f}\t{text}\n" for h, text in zip(hypotheses, texts)) + "\n"


def draw(best: Hypothesis, source: list[int], vocabularies: dict[str, Vocabulary], path: Path, *, words: bool) -> None:
    """Save a PNG of a translation's attention to its source, among words if `words`, else among tokens."""
    from vitkit.apps.explanations.text_drawing import draw_alignment
    from vitkit.apps.inference.translator import Alignment
    from vitkit.structures import EOS

    if not best.tokens:
        print(f"{path}: not drawn, because the translation is empty", file=sys.stderr)
        return
    source_tokens = vocabularies["source"].token_texts([*source, EOS])
    target_tokens = vocabularies["target"].token_texts(best.tokens)
    alignment = Alignment(best.attention[:, : len(source_tokens)], source_tokens, target_tokens)
    draw_alignment(*(alignment.by_word() if words else alignment), path)
    print(f"drew {path}", file=sys.stderr)


def number_path(path: Path, index: int, count: int) -> Path:
    """Return the path of a line's PNG: `path` itself for a single line; NAME_3.png for the third of several."""
    return path if count == 1 else path.with_name(f"{path.stem}_{index + 1}{path.suffix}")


if __name__ == "__main__":
    main()
