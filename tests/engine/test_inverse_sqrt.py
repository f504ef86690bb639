import pytest
import torch
from torch import nn

from vitkit.errors import ConfigError
from vitkit.registry import OPTIMIZERS, SCHEDULES


def test_learning_rate_rises_and_falls_as_in_the_paper():
    d_model, warmup, lr = 512, 40, (512 * 40) ** -0.5
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    spec = dict(type="InverseSqrtLR", warmup_steps=warmup)
    schedule = SCHEDULES.build(spec, optimizer=optimizer, steps_per_epoch=10, epochs=20)
    for step in range(1, 200):
        published = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert schedule.get_last_lr()[0] == pytest.approx(published)
        optimizer.step()
        schedule.step()


def test_warm_up_is_required_and_may_be_given_in_epochs():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    spec = dict(type="InverseSqrtLR", warmup_epochs=2)
    schedule = SCHEDULES.build(spec, optimizer=optimizer, steps_per_epoch=10, epochs=20)
    assert schedule.get_last_lr() == [pytest.approx(1 / 20)]
    with pytest.raises(ConfigError, match="schedule.warmup_steps: got 0; expected at least 1"):
        SCHEDULES.build("InverseSqrtLR", optimizer=optimizer, steps_per_epoch=10, epochs=20)


def test_optimizer_accepts_the_settings_of_the_paper():
    spec = dict(type="AdamW", lr=7e-4, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0)
    (group,) = OPTIMIZERS.build(spec, model=nn.Linear(2, 2)).param_groups
    assert group["betas"] == (0.9, 0.98) and group["eps"] == 1e-9
