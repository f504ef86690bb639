import math

import pytest
import torch

from vitkit.errors import ConfigError
from vitkit.losses.captioning import CaptionLoss


def soft_outputs():
    """Return outputs of two captions of two words and one, over three locations, of which the second image has two;
    words are uniform over two."""
    attention = torch.tensor(
        [[[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]], [[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]], requires_grad=True
    )
    outputs = {
        "logits": torch.zeros(2, 2, 2, requires_grad=True),
        "attention": attention,
        "annotation_padding": torch.tensor([[False, False, False], [False, False, True]]),
    }
    return outputs, [{"tokens": torch.tensor([1, 1])}, {"tokens": torch.tensor([1])}]


def hard_outputs(drawn):
    outputs, targets = soft_outputs()
    return {**outputs, "sampled_log_weights": drawn, "reward_baseline": torch.zeros(2)}, targets


def test_attention_of_real_words_should_sum_to_one_at_every_location():
    outputs, targets = soft_outputs()
    losses = CaptionLoss(doubly_stochastic=2.0)(outputs, targets)
    # First: 1 - 0.5, 1 - 1, 1 - 0.5. Second: 1 - 0.25, 1 - 0.75; attention after the end does not count.
    first, second = 0.25 + 0.25, 0.5625 + 0.0625
    assert losses["doubly_stochastic"].item() == pytest.approx(2 * (first + second) / 3)
    assert losses["cross_entropy"].item() == pytest.approx(math.log(2))
    assert losses.keys() == {"cross_entropy", "doubly_stochastic"}


def test_reward_changes_the_weights_of_sampled_locations():
    drawn = torch.tensor([[-1.0, -2.0], [-3.0, -100.0]], requires_grad=True)
    outputs, targets = hard_outputs(drawn)
    outputs["reward_baseline"] = torch.tensor([-1.0, 5.0])
    criterion = CaptionLoss(reinforce=0.5, entropy=0.0)
    losses = criterion(outputs, targets)
    # Rewards -2 log 2 and -log 2, their mean moves the baseline a tenth of the way.
    baseline = 0.9 * -1.0 + 0.1 * (-1.5 * math.log(2))
    assert outputs["reward_baseline"].tolist() == pytest.approx([baseline, 6.0])
    advantages = [-2 * math.log(2) - baseline, -math.log(2) - baseline]
    expected = -0.5 * (advantages[0] * (-1 - 2) + advantages[1] * -3) / 3
    assert losses["reinforce"].item() == pytest.approx(expected)
    losses["reinforce"].backward()
    gradient = [[-0.5 * a / 3 * real for real in reals] for a, reals in zip(advantages, ([1, 1], [1, 0]))]
    assert torch.allclose(drawn.grad, torch.tensor(gradient))
    assert outputs["logits"].grad is None


def test_entropy_is_rewarded_over_real_words():
    outputs, targets = hard_outputs(torch.zeros(2, 2))
    losses = CaptionLoss(entropy=0.1)(outputs, targets)
    entropies = [math.log(2), math.log(2), -0.25 * math.log(0.25) - 0.75 * math.log(0.75)]
    assert losses["entropy"].item() == pytest.approx(-0.1 * sum(entropies) / 3)
    losses["entropy"].backward()
    assert outputs["attention"].grad.isfinite().all()


def test_baseline_starts_at_the_first_reward_and_is_constant_in_evaluation():
    outputs, targets = hard_outputs(torch.zeros(2, 2))
    criterion = CaptionLoss().eval()
    criterion(outputs, targets)
    assert outputs["reward_baseline"].tolist() == [0.0, 0.0]
    criterion.train()(outputs, targets)
    assert outputs["reward_baseline"].tolist() == pytest.approx([-1.5 * math.log(2), 1.0])
    # The trainer skips such a step, and restores only statistics of batch norms.
    criterion({**outputs, "logits": torch.full((2, 2, 2), math.nan)}, targets)
    assert outputs["reward_baseline"].tolist() == pytest.approx([-1.5 * math.log(2), 1.0])


def test_models_without_attention_are_refused():
    outputs, targets = soft_outputs()
    del outputs["attention"]
    with pytest.raises(
        ConfigError, match=r"no 'attention', which this loss also trains.*set criterion\.type=SequenceLoss"
    ):
        CaptionLoss()(outputs, targets)


def test_negative_weights_are_refused():
    with pytest.raises(ConfigError, match=r"^entropy=-1: expected at least 0"):
        CaptionLoss(entropy=-1)
