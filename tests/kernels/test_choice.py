"""The choice between fast paths and plain definitions."""

import os
import subprocess
import sys

import pytest

from vitkit.kernels import plain_only, use_kernels


def ask(choice):
    """Ask a new process, in which VITKIT_KERNELS is set, whether only plain definitions may run."""
    code = "from vitkit.kernels import plain_only; print(plain_only())"
    environment = os.environ | {"VITKIT_KERNELS": choice}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("choice", ["fast", "plain"])
def test_environment_chooses_at_import(choice):
    assert ask(choice).stdout.strip() == str(choice == "plain")


def test_unknown_choice_is_an_error():
    assert "ConfigError: VITKIT_KERNELS=quick: expected fast or plain." in ask("quick").stderr


def test_block_overrides_the_environment_until_it_ends():
    with use_kernels("plain"):
        with pytest.raises(KeyError), use_kernels("fast"):
            assert not plain_only()
            raise KeyError
        assert plain_only()
