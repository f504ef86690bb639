"""Figures of text models and captioners: attention among tokens, positions, expected tokens, beams."""

import re
import zlib

import numpy as np
from torch import nn

from vitkit.apps.explanations.drawing import draw_word_attention
from vitkit.apps.explanations.explain_options import ExplainRequest, Explanation, check_layer, prepare_image_to_draw
from vitkit.apps.explanations.pages import text_page, word_page
from vitkit.apps.explanations.text import (
    TextAttention,
    caption_attention,
    draw_beam_tree,
    text_attention,
    text_inputs,
    word_attention,
)
from vitkit.apps.explanations.text_drawing import draw_arcs, draw_expected, draw_heads, draw_positions
from vitkit.apps.inference.language import MaskFiller, TextContinuer
from vitkit.apps.inference.predictor import Predictor
from vitkit.apps.inference.translator import Translator
from vitkit.errors import ConfigError, DataError
from vitkit.nn.text_layers import TextPositions

KINDS = {
    "encoder": "Encoder self-attention",
    "decoder": "Decoder self-attention",
    "cross": "What each written token attends to in the source",
}
MAX_POSITIONS = 100

TextModel = Translator | TextContinuer | MaskFiller


def explain_text(loaded: TextModel, text: str, request: ExplainRequest, result: Explanation) -> None:
    """Draw a model's attention, expectations and beams for a sentence."""
    model, vocabularies = loaded.model, loaded.vocabularies
    if not text.strip():
        raise DataError("text: has no token. Give a sentence.")
    attention = text_attention(model, vocabularies, text, words=request.words)
    if unknown := vocabularies.get("source", vocabularies["target"]).describe_unknown():
        result.notes.append(unknown)
    result.stem = file_stem(text)
    draw_text(model, attention, request, result)
    if request.html and attention.layers:
        result.page(text_page(attention), "tokens.html", title=f"What tokens attend to: {text}")
    if "text" in model.returns:
        inputs = text_inputs(model, vocabularies, text)
        draw_beam_tree(model, vocabularies["target"], inputs, result.file("beams.png"), beams=request.beams)


def file_stem(text: str) -> str:
    """Return the beginning of the names of a sentence's files, with a checksum if the sentence does not fit."""
    name = re.sub(r"\W+", "_", text).strip("_") or "text"
    return name if len(name) <= 30 else f"{name[:30]}_{zlib.crc32(text.encode()) % 10_000:04}"


def explain_caption(predictor: Predictor, image: np.ndarray, request: ExplainRequest, result: Explanation) -> None:
    """Draw where a captioner looks for each word, its decoder's attention, expectations and beams."""
    model = predictor.model
    shown = prepare_image_to_draw(predictor, image)
    inputs = predictor.prepare([image]).to(predictor.device).inputs
    words, weights = word_attention(model, inputs)
    if words:
        draw_word_attention(shown, words, weights, result.file("words.png"))
        if request.html:
            title = f"Where the model looks: {' '.join(words)}"
            result.page(word_page(words, weights), "words.html", title=title, image=shown)
    else:
        result.notes.append("no figure of the words: the caption is empty")
    draw_text(model, caption_attention(model, inputs), request, result)
    draw_beam_tree(model, model.vocabulary, inputs, result.file("beams.png"), beams=request.beams)


def draw_text(model: nn.Module, attention: TextAttention, request: ExplainRequest, result: Explanation) -> None:
    """Save the PNGs of attention among tokens, positions and expectations that apply to a model."""
    chosen = {
        "encoder": ("encoder_layer", request.encoder_layer),
        "decoder": ("decoder_layer", request.decoder_layer),
        "cross": ("decoder_layer", request.decoder_layer),
    }
    for option, number in set(chosen.values()):
        kinds = [kind for kind in chosen if chosen[kind][0] == option]
        if number is not None and not any(map(attention.of_kind, kinds)):
            raise ConfigError(f"{option}: got {number}; the model has no such layer.")
    for kind, title in KINDS.items():
        layers = attention.of_kind(kind)
        if not layers or not layers[0].rows:
            continue
        number = check_layer(*chosen[kind], len(layers))
        rows, columns = layers[0].rows, layers[0].columns
        weights = [layer.weights.numpy() for layer in layers]
        draw_heads(weights, rows, columns, result.file(f"{kind}_heads.png"), title=title)
        draw_arcs(weights[number], rows, columns, result.file(f"{kind}_arcs.png"), title=f"{title}, layer {number}")
    codes = next((module.codes for module in model.modules() if isinstance(module, TextPositions)), None)
    if codes is None:
        result.notes.append("no figure of the position encoding: a recurrent model has none")
    else:
        codes = codes[:MAX_POSITIONS].detach().float().cpu()
        draw_positions(codes, result.file("positions.png"), title="Position encoding")
    is_masked = "masked_tokens" in model.returns
    title = "The most probable tokens at each position" if is_masked else "The most probable tokens after each"
    before = "at" if is_masked else "after"
    draw_expected(attention.expected, result.file("next_tokens.png"), title=title, before=before)
