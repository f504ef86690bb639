"""Text-prompted detectors as two functions of tensors: the text encoder, and the detector that reads its features.

A prompt is encoded once for any number of images, as its features do not depend on them before the two are fused.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vitkit.apps.export_reading.graphs import PADDED_IMAGES, Axes, ExportGraph, ImageGraph
from vitkit.apps.export_writing.checks import Inputs, run_graph
from vitkit.errors import ConfigError
from vitkit.heads.grounding_dino import EncodedPrompts
from vitkit.io.coco_classes import COCO_CLASSES
from vitkit.models.base import statistics_owner
from vitkit.models.grounding_dino import GroundingDINO, phrase_scores
from vitkit.models.text_prompted import TextPrompted
from vitkit.ops.boxes import scale_boxes
from vitkit.ops.detections import best_scores, suppress_duplicates
from vitkit.ops.images import float_statistics, normalize_images
from vitkit.structures import UNK, PromptTokens
from vitkit.text.prompt_tokens import prompt_layout, words_and_padding
from vitkit.text.vocabulary import SPACE


class TextFeaturesGraph(ExportGraph):
    """The text encoder: encodes prompts."""

    axes: Axes = {"tokens": ("batch", "length"), "blocks": ("batch", "length")}

    def forward(self, tokens: Tensor, blocks: Tensor) -> dict[str, Tensor]:
        """Encode prompts, (B, T) int64 each: `PromptTokens.tokens`, and `phrase_ids`, which files call `blocks`."""
        prompt = PromptTokens(tokens, blocks, words_and_padding(blocks)[0])
        return {"text_features": self.model.encode_prompts(prompt).features.float()}


class PromptedDetectorGraph(ImageGraph):
    """Returns pred_logits (B, Q, T) and pred_boxes (B, Q, 4), and the detections as scores, labels (B, N) and
    boxes_xyxy (B, N, 4) in pixels of the original images.

    Labels are numbers of phrases. Entries that are none, with the label -1, come last, as N is the same for all prompts
    of T tokens.
    """

    axes: Axes = {
        **PADDED_IMAGES,
        "image_sizes": ("batch", None),
        "text_features": ("batch", "length", None),
        "blocks": ("batch", "length"),
    }

    def forward(
        self, images: Tensor, padding_mask: Tensor, image_sizes: Tensor, text_features: Tensor, blocks: Tensor
    ) -> dict[str, Tensor]:
        """Detect what prompts name.

        Args:
            images: (B, 3, H, W) uint8 RGB.
            padding_mask: (B, H, W) bool, True = padding.
            image_sizes: (B, 2) int64, height and width of the original images.
            text_features: (B, T, d_model), from the text encoder.
            blocks: (B, T) int64, the prompts' `phrase_ids`, whose phrases all end with a separator.
        """
        model = self.model
        normalized = normalize_images(images, padding_mask, **float_statistics(statistics_owner(model)))
        prepared, padding = model.prepare(normalized.to(self.dtype), padding_mask)
        features = model.neck(model.backbone_maps(prepared, padding), padding)
        is_word, text_padding = words_and_padding(blocks)
        text = EncodedPrompts(text_features.to(self.dtype), text_padding, blocks, is_word)
        outputs = model.head(features, padding, text=text)
        outputs = {name: outputs[name].float() for name in ("pred_logits", "pred_boxes")}
        return outputs | self.finish(outputs, dict(image_sizes=image_sizes, blocks=blocks))

    def finish(self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the detections that the model's `postprocess` returns."""
        phrase_ids = inputs["blocks"]
        is_word, _ = words_and_padding(phrase_ids)
        # The number of phrases is not a size of any input: each is scored at its first token.
        is_first = is_word & (prompt_layout(phrase_ids).positions == 0)
        scores = phrase_scores(outputs["pred_logits"], phrase_ids, is_word, phrase_ids) * is_first[:, None]
        best = best_scores(scores, outputs["pred_boxes"], self.model.num_detections)
        best = best._replace(labels=phrase_ids.where(is_first, -1).gather(1, best.labels))
        scores, labels, boxes_xyxy, _ = suppress_duplicates(best, self.model.nms_iou)
        return dict(scores=scores, labels=labels, boxes_xyxy=scale_boxes(boxes_xyxy, inputs["image_sizes"]))


def prompted_graphs(model: torch.nn.Module) -> tuple[PromptedDetectorGraph, TextFeaturesGraph]:
    """Return the detector and the text encoder of a text-prompted model.

    Raises:
        ConfigError: no graphs are defined for it, or it has no vocabulary.
    """
    if not isinstance(model, TextPrompted) or not model.text_parts():
        raise ConfigError(f"export: no graph is defined for {type(model).__name__}, which takes a prompt.")
    if model.vocabulary is None:
        raise ConfigError(
            "export: GroundingDINO has no vocabulary to read prompts with. Set model.tokenizer to bert-base-uncased or "
            "to the folder of its files."
        )
    return PromptedDetectorGraph(model), TextFeaturesGraph(model)


def list_known_phrases(model: GroundingDINO, classes: Sequence[str]) -> list[str]:
    """Return some phrases of a model's vocabulary: its classes, COCO's, or else its own words.

    Raises:
        ConfigError: it knows no word.
    """
    vocabulary = model.vocabulary
    words = [word.strip(SPACE) for word in vocabulary.tokens[UNK + 1 :]]
    for names in (classes, COCO_CLASSES, [word for word in words if word.isalpha()]):
        distinct = {name.lower(): name for name in names if not set(".?") & set(name)}
        known = [name for name in distinct.values() if UNK not in vocabulary.encode(name)]
        if known:
            return known[:12]
    raise ConfigError("export: the model's vocabulary has no word to compare the file with. Train it on text.")


def prompt_inputs(model: GroundingDINO, phrases: Sequence[str]) -> list[Inputs]:
    """Return `tokens` and `blocks` of prompts of different lengths: a short one; two, padded; all phrases."""
    prompts = [phrases[:1]], [phrases[1:4] or phrases, phrases[:1]], [phrases]
    encoded = [model.tokenize(batch) for batch in prompts]
    return [{"tokens": batch.tokens, "blocks": batch.phrase_ids} for batch in encoded]


def with_text_features(images: Inputs, prompts: Inputs, encoder: TextFeaturesGraph) -> Inputs:
    """Return the detector's inputs of a batch: its images, with the prompts in rotation."""
    features, blocks = run_graph(encoder, prompts)["text_features"], prompts["blocks"]
    rows = torch.arange(len(images["images"])) % len(blocks)
    return images | {"text_features": features[rows], "blocks": blocks[rows]}


def text_digest(model: GroundingDINO) -> str:
    """Return a digest of the text encoder's weights, by which its file and the detector's are known to belong
    together."""
    digest = hashlib.sha256()
    for part in model.text_parts():
        for name, value in part.state_dict().items():
            digest.update(name.encode())
            digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
