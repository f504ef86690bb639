"""The sets of runs in configs/ablations: every arm is a valid config that trains a step."""

import pytest

from vitkit.config import load_config
from vitkit.tools.ablate import read_set, set_files, summary_of, train_command

ARMS = [(path, arm) for path in set_files() for arm in read_set(path).arms]


@pytest.mark.parametrize(("path", "arm"), ARMS, ids=[f"{path.stem}: {arm}" for path, arm in ARMS])
def test_arm_is_a_valid_config(path, arm):
    ablation = read_set(path)
    _, _, base, *overrides = train_command(ablation, arm, [])
    config = load_config(base, overrides)
    assert config["data"]["num_workers"] == 0, "loading processes' time would not be counted"
    assert summary_of(path) and f"vitkit ablate {path.stem}" in path.read_text()
