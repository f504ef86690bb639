"""The loss for text that is predicted token by token."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vitkit.distributed import RatioMeter, world_size
from vitkit.errors import ConfigError, DataError
from vitkit.losses.matched import mean_of_batches
from vitkit.protocols.criterion import Criterion
from vitkit.registry import CRITERIA
from vitkit.structures import PAD


@CRITERIA.register
class SequenceLoss(Criterion):
    """Cross entropy of every token except padding, averaged over the tokens of all ranks.

    `meters["token_accuracy"]` counts the tokens that were the most probable ones; `meters["nll"]` is the mean negative
    log probability of a token, in nats and not smoothed: its exponential is the perplexity.

    Args:
        label_smoothing: part of each target that is spread over the whole vocabulary
            (https://arxiv.org/abs/1512.00567); only used in training.
    Raises:
        ConfigError: label_smoothing is negative, or 1 or more.
    """

    needs_outputs = ("logits",)
    needs_targets = ("tokens",)

    def __init__(self, *, label_smoothing: float = 0.1):
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"label_smoothing={label_smoothing}: expected at least 0 and below 1.")
        self.label_smoothing = label_smoothing
        self.meters = {"token_accuracy": RatioMeter(), "nll": RatioMeter()}

    def forward(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Compute the loss.

        Args:
            outputs: logits (B, T, V); optionally masked (B, T) bool: only these tokens count, as in masked language
                models.
            targets: B targets with `tokens`, (T_i,) int64 with T the longest.
        Returns:
            cross_entropy: the mean over the tokens of all ranks.
        Raises:
            DataError: the targets' lengths do not match the logits.
        """
        logits = outputs["logits"]
        tokens = pad_sequence([target["tokens"] for target in targets], batch_first=True, padding_value=PAD)
        tokens = tokens.to(logits.device, non_blocking=True)
        if tokens.shape != logits.shape[:2]:
            raise DataError(
                f"targets: {tokens.shape[0]} of up to {tokens.shape[1]} tokens, but the model predicted "
                f"{logits.shape[0]} of {logits.shape[1]}; expected the token that follows each token of its input."
            )
        counted = tokens != PAD
        if "masked" in outputs:
            counted = counted & outputs["masked"]
        count = counted.sum()
        with torch.autocast(logits.device.type, enabled=False):
            log_probs = logits.float().log_softmax(dim=-1)
            nll = -log_probs.gather(-1, tokens[..., None])[..., 0].masked_fill(~counted, 0).sum()
            loss = nll
            if self.training and self.label_smoothing:
                spread = -log_probs.mean(dim=-1).masked_fill(~counted, 0).sum()
                loss = (1 - self.label_smoothing) * nll + self.label_smoothing * spread
            correct = (log_probs.detach().argmax(dim=-1) == tokens) & counted
        self.meters["token_accuracy"].add(correct.sum(), count)
        self.meters["nll"].add(nll, count)
        # By the average number of tokens per rank, the mean of the ranks' gradients is that of the joined batch.
        least = 1 / world_size() if self.training else 1
        return {"cross_entropy": loss / mean_of_batches(self, count.float()).clamp(min=least)}

    def count(self, targets: Sequence[Mapping[str, Any]]) -> float:
        """Return the number of tokens."""
        return sum(int((target["tokens"] != PAD).sum()) for target in targets)
