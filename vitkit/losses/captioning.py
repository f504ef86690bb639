"""The loss for captions with attention over the image (Xu et al. 2015, https://arxiv.org/abs/1502.03044)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vitkit.distributed import all_reduce_mean
from vitkit.errors import ConfigError
from vitkit.losses.matched import mean_of_batches
from vitkit.losses.sequence import SequenceLoss
from vitkit.protocols.criterion import Criterion
from vitkit.registry import CRITERIA
from vitkit.structures import PAD

_BASELINE_MOMENTUM = 0.9


@CRITERIA.register
class CaptionLoss(Criterion):
    """Cross entropy of the words, and terms that shape the attention.

    doubly_stochastic (equation 14): over a caption, the attention to each location of the image should sum to 1; the
    term is the squared difference, summed over the locations.

    reinforce and entropy (section 4.1) train hard attention. The first follows the gradient of the log weights of the
    sampled locations, multiplied by the amount by which the caption's log probability exceeds its moving average; the
    second maximizes the entropy of the weights.

    As in the paper, each term is per caption, like the log probability of all its words; all are divided by the
    number of words, as is the cross entropy.

    Args:
        label_smoothing: see `SequenceLoss`.
        doubly_stochastic: lambda, the weight of that term.
        reinforce: lambda_r; only for models with hard attention, as is `entropy`.
        entropy: lambda_e.
    Raises:
        ConfigError: a weight is negative; or, when called, the model's outputs have no attention.
    """

    needs_outputs = ("logits",)
    needs_targets = ("tokens",)

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        doubly_stochastic: float = 1.0,
        reinforce: float = 1.0,
        entropy: float = 0.002,
    ):
        super().__init__()
        for name, value in (("doubly_stochastic", doubly_stochastic), ("reinforce", reinforce), ("entropy", entropy)):
            if value < 0:
                raise ConfigError(f"{name}={value}: expected at least 0.")
        self.sequence = SequenceLoss(label_smoothing=label_smoothing)
        self.meters = self.sequence.meters
        self.doubly_stochastic = doubly_stochastic
        self.reinforce = reinforce
        self.entropy = entropy

    def forward(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Compute the losses.

        Args:
            outputs: outputs of `ShowAttendTell`.
            targets: B targets with `tokens` (T_i,).
        Returns:
            the terms of `SequenceLoss`, `doubly_stochastic`, and for hard attention `reinforce` and `entropy`.
        """
        if "attention" not in outputs:
            raise ConfigError(
                "CaptionLoss: the model's outputs have no 'attention', which this loss also trains. It is for "
                "ShowAttendTell: set criterion.type=SequenceLoss for other captioners."
            )
        losses = self.sequence(outputs, targets)
        with torch.autocast(outputs["logits"].device.type, enabled=False):
            tokens = pad_sequence([target["tokens"] for target in targets], batch_first=True, padding_value=PAD)
            tokens = tokens.to(outputs["logits"].device)
            real = tokens != PAD
            attention = outputs["attention"].float() * real[..., None]
            missing = (1 - attention.sum(1)).square().masked_fill(outputs["annotation_padding"], 0.0)
            num_words = mean_of_batches(self, real.sum().float()).clamp(min=1)  # the average per rank
            losses["doubly_stochastic"] = self.doubly_stochastic * missing.sum() / num_words
            if "reward_baseline" in outputs:
                losses |= self._hard_losses(outputs, attention, tokens, num_words)
        return losses

    def count(self, targets: Sequence[Mapping[str, Any]]) -> float:
        """Return the number of words."""
        return self.sequence.count(targets)

    def _hard_losses(
        self, outputs: Mapping[str, Tensor], attention: Tensor, tokens: Tensor, num_words: Tensor
    ) -> dict[str, Tensor]:
        real = tokens != PAD
        log_probs = outputs["logits"].detach().float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        rewards = (log_probs * real).sum(1)
        drawn = (outputs["sampled_log_weights"].float() * real).sum(1)
        advantages = rewards - self._moving_average(outputs["reward_baseline"], rewards.mean())
        # Clamped: locations without weight, such as padding, would give infinite gradients.
        entropy = -(attention * attention.clamp(min=1e-12).log()).sum()
        return {
            "reinforce": -self.reinforce * (advantages * drawn).sum() / num_words,
            "entropy": -self.entropy * entropy / num_words,
        }

    def _moving_average(self, baseline: Tensor, reward: Tensor) -> Tensor:
        """Return the moving average of the rewards, updated in training; it starts at the first batch's reward."""
        value, count = baseline.clone().unbind()
        if self.training:
            reward = all_reduce_mean(reward)
            value = torch.where(count > 0, _BASELINE_MOMENTUM * value + (1 - _BASELINE_MOMENTUM) * reward, reward)
            # A step whose loss is not finite is skipped, and later ones must not be.
            baseline.copy_(torch.stack([value, count + 1]).where(value.isfinite(), baseline))
        return value
