"""Grounding DINO: backbone, neck, text encoder, head (Liu et al. 2023, https://arxiv.org/abs/2303.05499)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError, DataError
from vitkit.heads.grounding_dino import EncodedPrompts
from vitkit.kernels import is_exporting
from vitkit.models.base import Detector, attention_in, check_detections
from vitkit.models.text_prompted import TextPrompted, TextReading
from vitkit.nn.queries import training_queries_of
from vitkit.ops.boxes import cxcywh_to_xyxy, scale_boxes
from vitkit.ops.detections import BatchDetections, best_scores, in_pixels, join_detections, suppress_duplicates
from vitkit.protocols.model import child
from vitkit.registry import MODELS, TEXT_ENCODERS, Spec
from vitkit.structures import PAD, AttentionLayers, Detections, DetectionTarget, PhraseDetections, PromptTokens
from vitkit.text.prompt_tokens import PromptPart, phrase_tokens, split_prompts, words_and_padding
from vitkit.text.prompts import (
    MAX_TOKENS,
    Caption,
    EncodedCaption,
    Prompt,
    collate_prompts,
    encode_caption,
    encode_phrases,
    name_objects,
    split_phrases,
)
from vitkit.text.vocabulary import Vocabulary


class EncodedText(NamedTuple):
    """The encoded prompts of a batch of images."""

    phrase_ids: Tensor
    """(B, S), of the whole prompts, see `PromptTokens`."""
    parts: Sequence[tuple[EncodedPrompts, Tensor]]
    """The parts in which the prompts are read, and the number of the first phrase of each, (B,), see `PromptPart`."""
    captions: Sequence[tuple[EncodedCaption, float]] | None = None
    """The captions that the prompts are made of, with their thresholds; None for phrases."""


@MODELS.register
class GroundingDINO(TextPrompted, Detector):
    """A detector of the objects that the phrases of a text name: the label of a detection is the number of its phrase.

    In training, a batch's `inputs` have `prompt` (see `PromptTokens`, and `vitkit.text.prompts`, which makes them), and
    the labels of its targets are numbers of the image's phrases. An image's prompt may have any phrases, also such that
    it does not show. In evaluation it may be of any length: its parts are read one after the other, from maps of the
    image that the backbone computes once.

    Args:
        backbone, neck, head: spec or module.
        text_encoder: spec or module, registered in TEXT_ENCODERS.
        tokenizer: the vocabulary that prompts are tokenized with, of which a run sets its dataset's; or where it is
            found, for whoever builds the model: "bert-base-uncased", or the path of its file or folder, see
            `vitkit.weights.tokenizer_files.find_tokenizer`.
        max_tokens: the largest number of tokens that are read at once, which is also the number of label embeddings of
            denoising queries by place.
        chunk_size: in evaluation, the largest number of phrases that are read at once; None: as many as `max_tokens`
            hold. MM-Grounding-DINO evaluates LVIS with 40.
        num_queries: number of boxes predicted per image.
        num_detections: number of detections per image, and of a prompt that is read in parts for each of them.
        nms_iou, training_queries, isolate_padding: see `DINO`.
    Raises:
        ConfigError: a number is out of range; see `DensePredictionModel`.
    """

    class_activation = "sigmoid"
    score_threshold = 0.35  # of boxes, in the original's demo

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        text_encoder: Spec | nn.Module,
        *,
        tokenizer: Vocabulary | str | None = None,
        max_tokens: int = MAX_TOKENS,
        chunk_size: int | None = None,
        num_queries: int = 900,
        num_detections: int = 300,
        nms_iou: float | None = None,
        training_queries: Sequence[Spec] = (),
        isolate_padding: bool = False,
    ):
        if max_tokens < 4:
            raise ConfigError(f"max_tokens={max_tokens}: expected at least 4, for a word, its dot and both ends.")
        if chunk_size is not None and chunk_size < 1:
            raise ConfigError(f"chunk_size={chunk_size}: expected at least 1 phrase, or None for as many as possible.")
        super().__init__(
            backbone, neck, head, num_classes=None, num_queries=num_queries, isolate_padding=isolate_padding
        )
        check_detections(num_detections, nms_iou)
        stated = isinstance(text_encoder, Mapping) and "vocabulary_size" in text_encoder
        self.vocabulary = None if isinstance(tokenizer, str) else tokenizer
        known = self.vocabulary is not None and not stated
        size = {"vocabulary_size": max(self.vocabulary.numbers) + 1} if known else {}
        self.text_encoder = TEXT_ENCODERS.build(text_encoder, **size)
        self.text_projection = nn.Linear(self.text_encoder.d_model, self.head.d_model)
        nn.init.xavier_uniform_(self.text_projection.weight)
        nn.init.zeros_(self.text_projection.bias)
        self.add_training_queries(training_queries, num_classes=max_tokens)
        self.max_tokens, self.chunk_size = max_tokens, chunk_size
        self.num_detections, self.nms_iou = num_detections, nms_iou

    def attention_layers(self) -> AttentionLayers:
        """Return the decoder's attention to the image and to the prompt, and that between these two."""
        encoder, decoder = child(self.head, "encoder"), child(self.head, "decoder")
        fusion = [layer.attn for layer in child(encoder, "fusion_layers")]
        return super().attention_layers()._replace(prompt=attention_in(decoder, "text_attn"), fusion=fusion)

    def tokenize(self, texts: Sequence[Prompt]) -> PromptTokens:
        """Return the tokens of a text for each image.

        Raises:
            ConfigError: the model has no vocabulary.
            DataError: a text is not a prompt; see `vitkit.text.prompts`.
        """
        prompts = [tuple(split_phrases(text)) for text in texts]
        vocabulary = self._require_vocabulary()
        encoded = {phrases: encode_phrases(vocabulary, phrases, max_tokens=None) for phrases in set(prompts)}
        return collate_prompts([encoded[phrases] for phrases in prompts])

    def _tokenize_caption(self, caption: Caption) -> EncodedCaption:
        return encode_caption(self._require_vocabulary(), caption.text, max_tokens=self.max_tokens)

    def _require_vocabulary(self) -> Vocabulary:
        if self.vocabulary is None:
            raise ConfigError(
                "GroundingDINO has no vocabulary to read a text with. Set model.tokenizer to bert-base-uncased or "
                "to the folder of its files and load the model (vitkit.load), or give tokens and phrase_ids."
            )
        return self.vocabulary

    def read_text(self, text: Prompt | Caption) -> TextReading:
        captions = [(self._tokenize_caption(text), text.threshold)] if isinstance(text, Caption) else None
        prompt = self.tokenize([text]) if captions is None else collate_prompts([captions[0][0].prompt])
        split_prompts(prompt, max_tokens=self.max_tokens)
        vocabulary = self._require_vocabulary()
        ids = {number: index for index, number in reversed(list(enumerate(vocabulary.numbers)))}
        return TextReading(
            split_phrases(text) if captions is None else [],
            vocabulary.token_texts([ids[number] for number in prompt.tokens[0].tolist()]),
            prompt.phrase_ids.masked_fill(~prompt.is_word, -1)[0].tolist(),
            (prompt, captions),
        )

    def text_parts(self) -> Sequence[nn.Module]:
        """Return the text encoder and its projection."""
        return self.text_encoder, self.text_projection

    def encode_text(self, reading: TextReading, num_images: int, device: torch.device) -> EncodedText:
        prompt, captions = reading.tokens
        # A row for each image, which rounds as if it was encoded together with them.
        repeated = PromptTokens(*(field.to(device).repeat(num_images, 1) for field in prompt))
        return self._encode(repeated, None if captions is None else captions * num_images)

    def encode_shared(self, inputs: Mapping[str, Any], kept: dict[str, Any]) -> Mapping[str, Any]:
        """Encode a prompt unless the batch before had the same, such as the names of a dataset's classes."""
        prompt = inputs.get("prompt")
        if prompt is None:
            return inputs
        if "prompt" not in kept or not all(map(torch.equal, prompt, kept["prompt"])):
            kept |= {"prompt": prompt, "text": self._encode(prompt)}
        return {**inputs, "prompt": None, "text": kept["text"]}

    def example_prompts(self, batch_size: int) -> dict[str, Any]:
        """Return prompts as long as that of COCO's 80 classes in BERT's tokens, 195, or as `max_tokens` holds."""
        lengths = ([3] * 33 + [2] * 47)[: max(1, (self.max_tokens - 2) // 3)]  # with the dot
        phrase_ids = [-1, *(phrase for phrase, length in enumerate(lengths) for _ in range(length)), -1]
        phrase_ids = torch.tensor([phrase_ids]).expand(batch_size, -1)
        return {"prompt": PromptTokens(torch.ones_like(phrase_ids), phrase_ids, words_and_padding(phrase_ids)[0])}

    def query_scores(self, outputs: Mapping[str, Any], num_classes: int) -> Tensor:
        """Return the score of each phrase for each query, see `phrase_scores`.

        Raises:
            DataError: the prompt is read in parts, each of which has queries of its own.
        """
        if "chunks" in outputs:
            raise DataError(
                f"text: {num_classes} phrases are read in {len(outputs['chunks'])} parts, of which each has its own "
                "queries. Give fewer phrases at a time."
            )
        return phrase_scores(outputs["pred_logits"], outputs["phrase_ids"], outputs["is_word"])

    def encode_prompts(self, prompt: PromptTokens) -> EncodedPrompts:
        """Encode prompts, which does not depend on the images."""
        tokens, phrase_ids, is_word = prompt
        features = self.text_projection(self.text_encoder(tokens, phrase_ids))
        return EncodedPrompts(features, tokens == PAD, phrase_ids, is_word)

    def _encode(
        self, prompt: PromptTokens, captions: Sequence[tuple[EncodedCaption, float]] | None = None
    ) -> EncodedText:
        """Encode prompts, in parts if they are long."""
        is_long = self.chunk_size is not None or prompt.shape[1] > self.max_tokens
        if is_long and not is_exporting():
            max_phrases = None if captions else self.chunk_size
            parts = split_prompts(prompt, max_tokens=self.max_tokens, max_phrases=max_phrases)
        else:
            parts = [PromptPart(prompt, prompt.tokens.new_zeros(len(prompt.tokens)))]
        encoded = [(self.encode_prompts(part.prompt), part.first_phrase) for part in parts]
        return EncodedText(prompt.phrase_ids, encoded, captions)

    def forward(
        self,
        images: Tensor,
        padding_mask: Tensor | None = None,
        prompt: PromptTokens | None = None,
        *,
        text: Sequence[Prompt | Caption] | EncodedText | None = None,
        targets: Sequence[DetectionTarget] | None = None,
    ) -> dict[str, Any]:
        """Predict a box per query, and a logit for each token of the image's prompt.

        Args:
            prompt: (B, T), the prompts.
            text: in its place the prompts as text or phrases; or, not in training, a caption for each image, or what
                `encode_text` returned for them.
            targets: only in training, see `uses_targets`.
        Returns:
            the head's outputs:
            pred_logits: (B, Q, T), a sigmoid per token; -inf for padding.
            pred_boxes: (B, Q, 4) cxcywh in 0..1 of the unpadded image.
            aux_outputs: the same two for each decoder layer but the last, first layer first.
            training_outputs: of the first stage, and of training queries if there are any: a list, see `QuerySet`.
            text_padding: (B, T) bool, True = padding.
            and the prompts' `phrase_ids` and `is_word`; `captions` if these are given.
            If the prompts are read in parts, there are only `phrase_ids` and `chunks`, a list with the outputs of each
            part and its `first_phrase`, see `split_prompts`.
        Raises:
            ConfigError: there is neither text nor a prompt.
            DataError: a text is not a prompt, or a prompt is too long.
        """
        captions = None
        if prompt is None and not isinstance(text, EncodedText):
            if text is None:
                raise ConfigError("GroundingDINO looks for what a text names, and has none: give text or tokens.")
            if isinstance(text[0], Caption):
                captions = [(self._tokenize_caption(caption), caption.threshold) for caption in text]
                prompt = collate_prompts([caption.prompt for caption, _ in captions])
            else:
                prompt = self.tokenize(text)
            prompt = prompt.to(images.device)
        images, padding_mask = self.prepare(images, padding_mask)
        if self.training:
            return self._train(images, padding_mask, prompt, targets)
        encoded = self._encode(prompt, captions) if prompt is not None else text
        features = self.neck(self.backbone_maps(images, padding_mask), padding_mask)
        outputs = [
            self.head(features, padding_mask, text=part) | {"phrase_ids": part.phrase_ids, "is_word": part.is_word}
            for part, _ in encoded.parts
        ]
        if len(outputs) > 1:
            chunks = [one | {"first_phrase": first} for one, (_, first) in zip(outputs, encoded.parts)]
            return {"phrase_ids": encoded.phrase_ids, "chunks": chunks}
        return outputs[0] if encoded.captions is None else outputs[0] | {"captions": encoded.captions}

    def _train(
        self,
        images: Tensor,
        padding_mask: Tensor | None,
        prompt: PromptTokens,
        targets: Sequence[DetectionTarget] | None,
    ) -> dict[str, Any]:
        """Return the outputs of `forward` for prepared images in training."""
        if prompt.shape[1] > self.max_tokens:
            raise DataError(
                f"a prompt has {prompt.shape[1]} tokens, and the model trains with at most {self.max_tokens}. Set "
                f"data.prompts.max_tokens={self.max_tokens}, so that each image's prompt has fewer negatives."
            )
        features = self.neck(self.backbone_maps(images, padding_mask), padding_mask)
        text = self.encode_prompts(prompt)
        if targets is None:
            outputs = self.head(features, padding_mask, text=text)
        else:
            described = with_phrase_features(targets, text)
            added = training_queries_of(self.training_queries.values(), described)
            outputs = added.separate(self.head(features, padding_mask, text=text, added=added), self.head)
        return outputs | {"phrase_ids": prompt.phrase_ids, "is_word": prompt.is_word}

    def detections(self, outputs: Mapping[str, Any]) -> BatchDetections:
        """Return the best pairs of a query and a phrase, best first; a query may be returned with several phrases.

        The score of a phrase is the mean of its tokens' probabilities. A batch whose prompts differ in length has pairs
        with phrases that an image's prompt does not have; their score is 0. Of a prompt that is read in parts, it
        returns the best pairs of each of them, whose queries are numbered on.
        """
        if "chunks" in outputs:
            parts = [self.detections(chunk) for chunk in outputs["chunks"]]
            firsts = [chunk["first_phrase"] for chunk in outputs["chunks"]]
            count = outputs["chunks"][0]["pred_boxes"].shape[1]
            return join_detections(
                part._replace(labels=part.labels + first[:, None], queries=part.queries + index * count)
                for index, (part, first) in enumerate(zip(parts, firsts))
            )
        scores = phrase_scores(outputs["pred_logits"], outputs["phrase_ids"], outputs["is_word"])
        best = best_scores(scores, outputs["pred_boxes"], self.num_detections)
        return suppress_duplicates(best, self.nms_iou)

    def postprocess(
        self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]
    ) -> list[Detections] | list[PhraseDetections]:
        """Return the detections of each image, in pixels of the original image, labeled by their phrases' numbers; or
        with the words of a caption, see `name_objects`, in place of labels."""
        if "captions" in outputs:
            return self._name_detections(outputs, image_sizes)
        results = in_pixels(self.detections(outputs), image_sizes)
        counts = (outputs["phrase_ids"].amax(1) + 1).tolist()
        kept = [result["labels"] < count for result, count in zip(results, counts)]
        return [{name: value[rows] for name, value in result.items()} for result, rows in zip(results, kept)]

    def _name_detections(
        self, outputs: Mapping[str, Any], image_sizes: Sequence[tuple[int, int]]
    ) -> list[PhraseDetections]:
        boxes_xyxy = scale_boxes(cxcywh_to_xyxy(outputs["pred_boxes"].float()), image_sizes)
        results = []
        for logits, boxes, (caption, threshold) in zip(outputs["pred_logits"], boxes_xyxy, outputs["captions"]):
            scores, words, names = name_objects(logits.float().sigmoid(), caption, threshold)
            scores, order = scores.topk(min(self.num_detections, len(scores)))
            best = BatchDetections(scores[None], words[order][None], boxes[order][None], order[None])
            scores, _, boxes, order = (field[0] for field in suppress_duplicates(best, self.nms_iou))
            results.append(
                PhraseDetections(scores=scores, phrases=[names[i] for i in order.tolist()], boxes_xyxy=boxes)
            )
        return results


def phrase_scores(logits: Tensor, phrase_ids: Tensor, is_word: Tensor, phrases: Tensor | None = None) -> Tensor:
    """Return the mean probability of each phrase's tokens, (B, Q, P) float32; 0 for phrases that an image lacks.

    Args:
        logits: (B, Q, T).
        phrase_ids, is_word: (B, T), see `PromptTokens`.
        phrases: (B, P) numbers of phrases; None: those of the prompt with the most of them.
    """
    if phrases is None:
        phrases = torch.arange(int(phrase_ids.max()) + 1, device=phrase_ids.device).expand(len(phrase_ids), -1)
    tokens = phrase_tokens(phrase_ids, is_word, phrases).float()
    return logits.float().sigmoid() @ (tokens / tokens.sum(-1, keepdim=True).clamp(min=1)).mT


def with_phrase_features(targets: Sequence[DetectionTarget], text: EncodedPrompts) -> list[DetectionTarget]:
    """Return targets with `phrase_features`, (P, d_model): the mean of the encoded tokens of each of the image's
    phrases, which `TextDenoising` reads."""
    described = []
    for target, features, _, phrase_ids, words in zip(targets, *text):
        numbers = torch.arange(int(phrase_ids.max()) + 1, device=phrase_ids.device)
        tokens = phrase_tokens(phrase_ids, words, numbers).float()
        means = (tokens / tokens.sum(-1, keepdim=True).clamp(min=1)).to(features.dtype) @ features
        described.append({**target, "phrase_features": means})
    return described
