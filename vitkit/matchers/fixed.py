"""A fixed query for each class in place of matching (Cheng et al. 2021, section 4.3,
https://arxiv.org/abs/2107.06278)."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.errors import DataError
from vitkit.matchers.base import LayersOfSet, Matcher
from vitkit.registry import MATCHERS
from vitkit.structures import DetectionTarget, ImageMatches, Matches, describe_image


@MATCHERS.register
class FixedMaskMatcher(Matcher):
    """Assigns the target of class c to query c, for semantic segmentation with as many queries as classes."""

    def forward(self, layers_and_targets: Sequence[LayersOfSet], *, input_size: tuple[int, int]) -> list[Matches]:
        """Return the matches of each set; arguments as in `HungarianMaskMatcher.forward`.

        Raises:
            DataError: an image has two targets of the same class, or there are fewer queries than classes.
        """
        return [[self._match(layers[0], targets)] * len(layers) for layers, targets in layers_and_targets]

    def _match(self, layer: Mapping[str, Any], targets: Sequence[DetectionTarget]) -> list[ImageMatches]:
        num_queries = layer["pred_logits"].shape[1]
        limit = min(num_queries, layer["pred_logits"].shape[2] - 1)
        matches = []
        for image, target in enumerate(targets):
            labels = target["labels"].cpu()
            if len(labels.unique()) < len(labels) or not ((labels >= 0) & (labels < limit)).all():
                raise DataError(
                    f"matching: {describe_image(image, target)} has labels {labels.tolist()}; expected each class "
                    f"once, all in 0..{limit - 1} (model.num_queries={num_queries})."
                )
            order = labels.argsort()
            matches.append((labels[order], order))
        return matches
