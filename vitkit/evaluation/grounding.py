"""Phrase localization: recall of phrases (Plummer et al. 2015, https://arxiv.org/abs/1505.04870) and accuracy of
expressions (Yu et al. 2016, https://arxiv.org/abs/1608.00272)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import box_convert, box_iou

from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.base import SampleEvaluator, get_predicted_field, require_annotations
from vitkit.protocols.dataset import Dataset
from vitkit.registry import EVALUATORS
from vitkit.structures import DetectionTarget
from vitkit.text.prompt_tokens import phrase_tokens


@EVALUATORS.register
class GroundingEvaluator(SampleEvaluator):
    """R1, R5 and R10: the fraction of phrases that have a box with IoU 0.5 among the best 1, 5 and 10.

    The score of a box is the mean probability of the tokens of the phrase; where the whole caption is the expression
    (RefCOCO), the highest of any of its tokens, and R1 is the accuracy. Of several boxes that a phrase names, any may
    be found.

    Args:
        dataset: the evaluated dataset, a `GroundingDataset`.
        ranks: the numbers of best boxes.
        iou: the smallest IoU of a box that is found.
    Raises:
        ConfigError: the dataset has no regions, or a number is out of range.
    """

    takes_outputs = True
    needs_dataset = ("image_ids", "located")

    def __init__(self, dataset: Dataset, *, ranks: Sequence[int] = (1, 5, 10), iou: float = 0.5):
        require_annotations(dataset, "regions", "GroundingEvaluator")
        super().__init__(dataset)
        if not ranks or min(ranks) < 1 or not 0 < iou <= 1:
            raise ConfigError(
                f"GroundingEvaluator: got ranks={list(ranks)} and iou={iou}; expected numbers from 1, an IoU up to 1."
            )
        self.ranks, self.iou = sorted(ranks), iou
        self._index_of = {int(image_id): index for index, image_id in enumerate(dataset.image_ids)}

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[DetectionTarget]) -> None:
        """Add one batch.

        Args:
            predictions: the raw outputs of `GroundingDINO` for each image.
            targets: of the same images, with `labels`, `image_id`, `original_size` and, unless all of a phrase names
                its objects, `positive_map`.
        Raises:
            DataError: an object was lost in the transforms.
            ConfigError: the model's outputs are not those of a text-prompted detector.
        """
        for outputs, target in zip(predictions, targets, strict=True):
            image_id = int(target["image_id"])
            if image_id not in self.stored_predictions:
                self.stored_predictions[image_id] = self._find(outputs, target, self._index_of[image_id])

    def _find(self, outputs: Mapping[str, Any], target: DetectionTarget, index: int) -> list[int]:
        """Return the rank of the best fitting box of each region, counted from 0; the last rank if none fits."""
        logits, boxes, phrase_ids, is_word, padding = (
            get_predicted_field(outputs, field, "GroundingEvaluator")
            for field in ("pred_logits", "pred_boxes", "phrase_ids", "is_word", "text_padding")
        )
        truth = self.dataset.located(index)
        if len(truth.regions) != len(target["labels"]):
            raise DataError(
                f"image {target['image_id']}: {len(target['labels'])} of {len(truth.regions)} objects are left after "
                "the transforms. Use those of evaluation: dict(type='EvalResize', short_side=800, max_size=1333)."
            )
        height, width = target["original_size"]
        boxes_xyxy = box_convert(boxes.float(), "cxcywh", "xyxy").cpu() * torch.tensor([width, height] * 2)
        probabilities = logits.float().sigmoid()
        positive = target.get("positive_map")
        if positive is None:
            positive = phrase_tokens(phrase_ids, is_word, target["labels"])
        ranks = []
        for region in np.unique(truth.regions):
            rows = np.flatnonzero(truth.regions == region)
            if truth.is_expression:
                scores = probabilities.masked_fill(padding, 0).amax(-1)
            else:
                tokens = positive[rows[0]].float()
                scores = probabilities[:, : len(tokens)] @ tokens / tokens.sum()
            ranks.append(self._rank(scores.cpu(), boxes_xyxy, torch.from_numpy(truth.boxes_xyxy[rows])))
        return ranks

    def _rank(self, scores: Tensor, boxes_xyxy: Tensor, true_xyxy: Tensor) -> int:
        best = scores.argsort(descending=True, stable=True)[: self.ranks[-1]]
        fits = (box_iou(boxes_xyxy[best], true_xyxy).amax(1) >= self.iou).nonzero()
        return int(fits[0]) if len(fits) else self.ranks[-1]

    def _compute(self) -> dict[str, float]:
        """Return the fraction of phrases found at each number of boxes; without a prediction, an image has none."""
        total = [len(np.unique(self.dataset.located(index).regions)) for index in self._index_of.values()]
        found = np.array([rank for ranks in self.stored_predictions.values() for rank in ranks], np.int64)
        self.num_phrases = sum(total)
        return {
            f"R{rank}": float((found < rank).sum()) / self.num_phrases if self.num_phrases else -1.0
            for rank in self.ranks
        }

    def _table_lines(self) -> list[str]:
        values = "  ".join(f"{name} {'–' if value < 0 else f'{value:.3f}'}" for name, value in self.metrics.items())
        return [f"{self.num_phrases} phrases, found with IoU {self.iou:g}", values]
