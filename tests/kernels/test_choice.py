"""The choice between fast paths and plain definitions."""

import runpy

import pytest

import vitkit.kernels
from vitkit.errors import ConfigError
from vitkit.kernels import plain_only, use_kernels


@pytest.fixture
def ask(monkeypatch):
    """Return a function that imports the module with VITKIT_KERNELS set, and says whether it allows plain ones only."""

    def ask(choice):
        monkeypatch.setenv("VITKIT_KERNELS", choice)
        return runpy.run_path(vitkit.kernels.__file__)["plain_only"]()

    return ask


@pytest.mark.parametrize("choice", ["fast", "plain"])
def test_environment_chooses_at_import(ask, choice):
    assert ask(choice) == (choice == "plain")


def test_unknown_choice_is_an_error(ask):
    with pytest.raises(ConfigError, match="^VITKIT_KERNELS=quick: expected fast or plain."):
        ask("quick")


def test_block_overrides_the_environment_until_it_ends():
    with use_kernels("plain"):
        with pytest.raises(KeyError), use_kernels("fast"):
            assert not plain_only()
            raise KeyError
        assert plain_only()
