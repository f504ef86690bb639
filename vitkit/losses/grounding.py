"""The loss of detectors whose classes are tokens of a text (Grounding DINO, https://arxiv.org/abs/2303.05499)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import DataError
from vitkit.losses.class_losses import token_focal_loss
from vitkit.losses.matched import SetLayers, normalizers
from vitkit.losses.set_criterion import SetCriterion
from vitkit.registry import CRITERIA, Spec
from vitkit.structures import DetectionTarget, describe_image
from vitkit.text.prompt_tokens import phrase_tokens


@CRITERIA.register
class GroundingCriterion(SetCriterion):
    """Focal loss of every query's tokens, and L1 and GIoU losses of the matched boxes, for every decoder layer.

    A matched query is positive for the tokens of its target's phrase and negative for the prompt's other tokens, its
    ends and separators included; padding does not count. The sums are divided by the number of targets, so that a
    phrase of many tokens weighs more.

    Args:
        matcher: a spec of the matcher (see `TokenMatcher`), or the matcher.
        weights: the weight of each of `terms`.
        focal_alpha: weight of positive tokens; negative ones have 1 - alpha (0.25 if None).
        focal_gamma: exponent by which the loss down-weights well classified tokens (2 if None).
    Raises:
        ConfigError: a term is unknown or missing, or the matcher's costs are for other logits.
    """

    mask_terms = ()
    needs_outputs = ("phrase_ids",)  # and those of `forward`, which are in `chunks` if prompts are read in parts

    def __init__(
        self,
        matcher: Spec | nn.Module,
        weights: Mapping[str, float],
        *,
        focal_alpha: float | None = None,
        focal_gamma: float | None = None,
    ):
        super().__init__(matcher, weights, class_loss="focal", focal_alpha=focal_alpha, focal_gamma=focal_gamma)

    def forward(self, outputs: Mapping[str, Any], targets: Sequence[DetectionTarget]) -> dict[str, Tensor]:
        """Match queries to targets, and compute the losses of every layer.

        Args:
            outputs: pred_logits (B, Q, T) for the tokens of each prompt; pred_boxes (B, Q, 4) cxcywh in 0..1;
                text_padding (B, T) bool; optionally aux_outputs and training_outputs, see `SetCriterion`. Also the
                prompts' `phrase_ids` and `is_word`, see `PromptTokens`. Or those of the prompts' parts, `chunks`, of
                which the losses are averaged.
            targets: B targets, whose labels are numbers of the phrases in their prompts. One with a `positive_map`,
                (N, up to T) bool, has its objects' tokens there, as in captions whose phrases overlap.
        Returns:
            Weighted scalars whose sum is the loss, by the names that `SetCriterion` gives them.
        Raises:
            DataError: a label is not one of the prompt's phrases, or a positive map does not fit the prompt.
        """
        if "chunks" in outputs:
            chunks = [
                self(chunk, targets_of_part(targets, outputs["phrase_ids"], chunk)) for chunk in outputs["chunks"]
            ]
            return {name: torch.stack([losses[name] for losses in chunks]).mean() for name in chunks[0]}
        return super().forward(outputs, with_positive_maps(targets, outputs["phrase_ids"], outputs["is_word"]))

    def set_losses(self, queries: SetLayers, outputs: Mapping[str, Any]) -> dict[str, Tensor]:
        logits = queries.stack("pred_logits")
        *indices, target = queries.list_matched_indices()
        tokens = torch.cat([t["positive_map"] for t in queries.targets])[target]  # (L, M, T)
        if queries.is_main:
            # The last layer of the main queries comes first.
            _, image, query = indices
            best = logits[0, image[0], query[0]].detach().argmax(-1, keepdim=True)
            correct = tokens[0].gather(1, best).sum()
            self.meters["matched_accuracy"].add(correct, torch.full_like(correct, len(best)))
        _, num_targets = normalizers(self, 0, sum(queries.counts), logits.device)
        normalizer = queries.repeats * num_targets
        padding = queries.layers[0]["text_padding"]
        labels = token_focal_loss(logits, indices, tokens, padding, **self.sigmoid_settings) / normalizer
        boxes = queries.stack("pred_boxes")[tuple(indices)]
        target_boxes = torch.cat([t["boxes_cxcywh"] for t in queries.targets]).float()[target]
        box_losses = self.box_losses(boxes, target_boxes)
        terms = {name: values.sum(1) / normalizer for name, values in box_losses.items()}
        return queries.name_losses({"labels": labels, **terms}, self.weights)


def targets_of_part(
    targets: Sequence[DetectionTarget], phrase_ids: Tensor, part: Mapping[str, Any]
) -> list[DetectionTarget]:
    """Return the targets whose phrases are in one part of the prompts, labeled by their numbers in it.

    Args:
        phrase_ids: (B, T), of the whole prompts.
        part: the outputs for `vitkit.text.prompt_tokens.PromptPart`.
    """
    chosen = []
    for target, first, whole, own in zip(targets, part["first_phrase"], phrase_ids, part["phrase_ids"]):
        labels, numbers = target["labels"] - first, whole - first
        kept = (labels >= 0) & (labels <= own.max())
        of_part = {**target, "labels": labels[kept], "boxes_cxcywh": target["boxes_cxcywh"][kept]}
        if (positive := target.get("positive_map")) is not None:
            positive = F.pad(positive, (0, len(whole) - positive.shape[1]))[kept]
            of_part["positive_map"] = positive.new_zeros(len(positive), len(own))
            of_part["positive_map"][:, own >= 0] = positive[:, (numbers >= 0) & (numbers <= own.max())]
        chosen.append(of_part)
    return chosen


def with_positive_maps(
    targets: Sequence[DetectionTarget], phrase_ids: Tensor, is_word: Tensor
) -> list[DetectionTarget]:
    """Return targets with `positive_map`, (N, T) bool, the tokens of each object, and `num_phrases` of the prompt."""
    counts = phrase_ids.amax(1) + 1
    described = []
    for index, (target, of_token, words) in enumerate(zip(targets, phrase_ids, is_word)):
        tokens = target.get("positive_map")
        if tokens is None:
            tokens = phrase_tokens(of_token, words, target["labels"])
        elif tokens.shape[0] != len(target["labels"]) or tokens.shape[1] > len(of_token):
            raise DataError(
                f"{describe_image(index, target)}: positive_map is {tuple(tokens.shape)}; expected a row for each of "
                f"{len(target['labels'])} objects, and at most the prompt's {len(of_token)} tokens."
            )
        else:
            tokens = F.pad(tokens.bool(), (0, len(of_token) - tokens.shape[1]))
        described.append({**target, "positive_map": tokens, "num_phrases": counts[index]})
    return described
