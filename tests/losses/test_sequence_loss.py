import math
from pathlib import Path

import pytest
import torch
from helpers.processes import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vitkit.distributed import rank
from vitkit.errors import ConfigError, DataError
from vitkit.losses.sequence import SequenceLoss


def targets_of(*texts):
    return [{"tokens": torch.tensor(tokens)} for tokens in texts]


def test_the_loss_is_the_mean_over_all_tokens_by_hand():
    probabilities = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]], [[0.7, 0.1, 0.1, 0.1]] * 2])
    criterion = SequenceLoss(label_smoothing=0.2)
    targets = targets_of([3, 1], [2])
    probability = (0.4, 0.25, 0.1)
    nll = -sum(map(math.log, probability)) / 3
    spread = -(probabilities[0].log().mean(-1).sum() + probabilities[1, 0].log().mean()).item() / 3

    loss = criterion.train()({"logits": probabilities.log()}, targets)
    assert loss.keys() == {"cross_entropy"}
    assert loss["cross_entropy"].item() == pytest.approx(0.8 * nll + 0.2 * spread, rel=1e-5)
    assert criterion.eval()({"logits": probabilities.log()}, targets)["cross_entropy"].item() == pytest.approx(nll)
    assert criterion.meters["nll"].compute() == (pytest.approx(nll), 6)
    assert criterion.meters["token_accuracy"].compute() == (pytest.approx(1 / 3), 6)


def test_only_masked_tokens_count_for_masked_models():
    torch.manual_seed(0)
    logits, masked = torch.randn(2, 3, 8), torch.tensor([[True, False, False], [False, True, True]])
    criterion = SequenceLoss(label_smoothing=0.0)
    loss = criterion({"logits": logits, "masked": masked}, targets_of([5, 6, 7], [4, 4]))["cross_entropy"]
    log_probs = logits.log_softmax(-1)
    torch.testing.assert_close(loss, -(log_probs[0, 0, 5] + log_probs[1, 1, 4]) / 2)


def test_batch_without_counted_tokens_still_has_a_gradient():
    logits = torch.randn(1, 2, 8, requires_grad=True)
    loss = SequenceLoss()({"logits": logits, "masked": torch.zeros(1, 2, dtype=torch.bool)}, targets_of([5, 6]))
    loss["cross_entropy"].backward()
    assert loss["cross_entropy"].item() == 0 and not logits.grad.any()


def test_targets_of_another_length_are_an_error():
    with pytest.raises(DataError, match="targets: 2 of up to 3 tokens, but the model predicted 2 of 4"):
        SequenceLoss()({"logits": torch.randn(2, 4, 8)}, targets_of([4, 5, 6], [4]))


def test_label_smoothing_is_a_fraction():
    with pytest.raises(ConfigError, match=r"^label_smoothing=1\.0: expected at least 0 and below 1"):
        SequenceLoss(label_smoothing=1.0)


def make_step():
    torch.manual_seed(0)
    return nn.Linear(6, 9), torch.randn(4, 5, 6), targets_of([4, 5, 6, 7, 3], [4, 3], [8, 3], [5, 5, 3])


def gradients(model, x, targets):
    longest = max(len(target["tokens"]) for target in targets)
    SequenceLoss()({"logits": model(x[:, :longest])}, targets)["cross_entropy"].backward()
    return [parameter.grad for parameter in model.parameters()]


def of_own_texts(folder: Path) -> list:
    model, x, targets = make_step()
    own = slice(3 * rank(), 3 + rank())  # three texts and one
    return gradients(DistributedDataParallel(model), x[own], targets[own])


def test_gradients_of_two_ranks_equal_one_process(tmp_path: Path):
    torch.testing.assert_close(on_ranks(2, tmp_path, of_own_texts)[0], gradients(*make_step()))
