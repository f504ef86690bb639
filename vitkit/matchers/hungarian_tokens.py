"""The optimal assignment of queries to targets whose classes are tokens of a text."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vitkit.errors import ConfigError
from vitkit.matchers.hungarian import HungarianMatcher, focal_terms
from vitkit.registry import MATCHERS
from vitkit.structures import DetectionTarget


@MATCHERS.register
class TokenMatcher(HungarianMatcher):
    """Assigns queries to targets as `HungarianMatcher` does, with logits for tokens in place of classes.

    Args:
        label_cost: "phrase": the change of the focal loss if the tokens of the target's phrase were positive rather
            than negative, their mean (Grounding DINO). "prompt": the focal loss of all tokens of the prompt with those
            of the phrase as positive, their sum (MM-Grounding-DINO), in which long phrases count more.
    Raises:
        ConfigError: `label_cost` is unknown.
    """

    def __init__(
        self,
        cost_labels: float,
        cost_l1: float,
        cost_giou: float,
        *,
        label_cost: Literal["phrase", "prompt"] = "phrase",
    ):
        super().__init__(cost_labels, cost_l1, cost_giou, activation="sigmoid")
        if label_cost not in ("phrase", "prompt"):
            raise ConfigError(f"label_cost={label_cost!r}: expected 'phrase' or 'prompt'.")
        self.label_cost = label_cost

    def label_costs(
        self, layers: Sequence[Mapping[str, Tensor]], targets: Sequence[DetectionTarget], image: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the unweighted cost of each target's phrase, (L, T, Q), and whether the prompt has it, (T,).

        Args:
            layers: with pred_logits (B, Q, tokens) and text_padding (B, tokens) bool.
            targets: with positive_map (N, tokens) bool, the tokens of each object, and num_phrases; see
                `GroundingCriterion`, which adds them.
        """
        padding = layers[0]["text_padding"]
        logits = torch.stack([layer["pred_logits"] for layer in layers]).float().masked_fill(padding[:, None], 0)
        as_positive, as_negative = focal_terms(logits.sigmoid())  # (L, B, Q, tokens)
        maps = pad_sequence([target["positive_map"] for target in targets], batch_first=True).float()  # (B, N, tokens)
        if self.label_cost == "phrase":
            weights = maps / maps.sum(-1, keepdim=True).clamp(min=1)
            cost = torch.einsum("lbqt,bnt->lbnq", as_positive - as_negative, weights)
        else:
            cost = torch.einsum("lbqt,bnt->lbnq", as_positive, maps)
            negative = (~padding).float()[:, None] - maps
            cost = cost + torch.einsum("lbqt,bnt->lbnq", as_negative, negative)
        row = torch.cat([torch.arange(len(target["labels"])) for target in targets]).to(image.device, non_blocking=True)
        return cost[:, image, row], torch.cat([target["positive_map"] for target in targets]).any(-1)

    def label_range(self, layers: Sequence[Mapping[str, Tensor]], target: DetectionTarget) -> tuple[int, str]:
        return int(target["num_phrases"]), "Labels are numbers of the phrases in the image's prompt."
