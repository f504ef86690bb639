"""The figures of explain.py for text models, and for the captions of captioners."""

import argparse
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from vitkit.errors import ConfigError, DataError
from vitkit.explanations.drawing import draw_word_attention
from vitkit.explanations.html_page import write_explain_page
from vitkit.explanations.pages import text_page, word_page
from vitkit.explanations.text import (
    TextAttention,
    caption_attention,
    draw_beam_tree,
    load_text_model,
    text_attention,
    text_inputs,
    word_attention,
)
from vitkit.explanations.text_drawing import draw_arcs, draw_expected, draw_heads, draw_positions
from vitkit.inference import Predictor
from vitkit.seq2seq.decoding import TextGenerator
from vitkit.seq2seq.language_models import MaskedLanguageModel
from vitkit.seq2seq.transformer import TextPositions
from vitkit.tools.text_arguments import report_unknown

KINDS = {
    "encoder": "Encoder self-attention",
    "decoder": "Decoder self-attention",
    "cross": "What each written token attends to in the source",
}
MAX_POSITIONS = 100


def explain_text(config: dict, weights: str | Path, args: argparse.Namespace) -> Iterator[Path]:
    """Draw a model's attention, expectations and beams for the sentence --text, and yield the files."""
    model, vocabularies = load_text_model(config, weights, device=args.device)
    if not args.text.strip():
        raise DataError("--text: no token in it. Give a sentence.")
    attention = text_attention(model, vocabularies, args.text)
    report_unknown(vocabularies.get("source", vocabularies["target"]))
    stem = args.out / file_stem(args.text)
    yield from draw_text(model, attention, stem, args)
    if args.html and attention.layers:
        path = Path(f"{stem}_tokens.html")
        write_explain_page(text_page(attention), path, title=f"What tokens attend to: {args.text}")
        yield path
    if isinstance(model, TextGenerator):
        path = Path(f"{stem}_beams.png")
        inputs = text_inputs(model, vocabularies, args.text)
        draw_beam_tree(model, vocabularies["target"], inputs, path, beams=args.beams)
        yield path


def file_stem(text: str) -> str:
    """Return the beginning of the names of a sentence's files, with a checksum if the sentence does not fit."""
    name = re.sub(r"\W+", "_", text).strip("_") or "text"
    return name if len(name) <= 30 else f"{name[:30]}_{zlib.crc32(text.encode()) % 10_000:04}"


def explain_caption(predictor: Predictor, image, args: argparse.Namespace) -> Iterator[Path]:
    """Draw where a captioner looks for each word, its decoder's attention, expectations and beams."""
    model, shown = predictor.model, predictor.as_evaluated(image)
    inputs = predictor.prepare([image]).to(predictor.device).inputs
    stem = args.out / args.image.stem
    words, weights = word_attention(model, inputs)
    if words:
        path = Path(f"{stem}_words.png")
        draw_word_attention(shown, words, weights, path)
        yield path
        if args.html:
            path = path.with_suffix(".html")
            write_explain_page(
                word_page(words, weights), path, title=f"Where the model looks: {' '.join(words)}", image=shown
            )
            yield path
    yield from draw_text(model, caption_attention(model, inputs), stem, args)
    path = Path(f"{stem}_beams.png")
    draw_beam_tree(model, model.vocabulary, inputs, path, beams=args.beams)
    yield path


def draw_text(model: nn.Module, attention: TextAttention, stem: Path, args: argparse.Namespace) -> Iterator[Path]:
    """Save the PNGs that apply to a text model, and yield their paths."""
    for option, number, kinds in (
        ("--encoder-layer", args.encoder_layer, ["encoder"]),
        ("--decoder-layer", args.decoder_layer, ["decoder", "cross"]),
    ):
        if number is not None and not any(map(attention.of_kind, kinds)):
            raise ConfigError(f"{option}: got {number}; the model has no such layer.")
    chosen = {"encoder": args.encoder_layer, "decoder": args.decoder_layer, "cross": args.decoder_layer}
    for kind, title in KINDS.items():
        layers = attention.of_kind(kind)
        if not layers or not layers[0].rows:
            continue
        number = len(layers) - 1 if chosen[kind] is None else chosen[kind]
        if not 0 <= number < len(layers):
            option = "--encoder-layer" if kind == "encoder" else "--decoder-layer"
            raise ConfigError(f"{option}: got {number}; the model's layers are 0 to {len(layers) - 1}.")
        rows, columns = layers[0].rows, layers[0].columns
        path = Path(f"{stem}_{kind}_heads.png")
        draw_heads([layer.weights.numpy() for layer in layers], rows, columns, path, title=title)
        yield path
        path = Path(f"{stem}_{kind}_arcs.png")
        draw_arcs(layers[number].weights.numpy(), rows, columns, path, title=f"{title}, layer {number}")
        yield path
    codes = next((module.codes for module in model.modules() if isinstance(module, TextPositions)), None)
    if codes is None:
        print("no picture of the position encoding: a recurrent model has none")
    else:
        path = Path(f"{stem}_positions.png")
        draw_positions(codes[:MAX_POSITIONS].detach().float().cpu(), path, title="Position encoding")
        yield path
    path = Path(f"{stem}_next_tokens.png")
    masked = isinstance(model, MaskedLanguageModel)
    title = "The most probable tokens at each position" if masked else "The most probable tokens after each"
    draw_expected(attention.expected, path, title=title, before="at" if masked else "after")
    yield path
