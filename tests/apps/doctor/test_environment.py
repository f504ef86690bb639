"""The block for bug reports."""

import platform

import torch

import vitkit
from vitkit.apps.doctor.environment import describe_environment
from vitkit.tools.doctor import main


def rows(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines())


def test_environment_has_versions_and_devices():
    described = rows(describe_environment())
    assert described["vitkit"].startswith(vitkit.__version__)
    assert described["python"].startswith(platform.python_version())
    assert described["torch"].startswith(torch.__version__)
    assert "cores" in described["processor"] and described["threads"].startswith(str(torch.get_num_threads()))
    assert (described["accelerators"] == "none") == (not torch.accelerator.is_available())


def test_environment_shows_variables_that_change_results_and_no_paths(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_HOME", "/home/somebody/torch")
    monkeypatch.setenv("HF_TOKEN", "secret")
    variables = rows(describe_environment())["variables"]
    assert "OMP_NUM_THREADS=1" in variables and "TORCH_HOME" in variables
    assert "somebody" not in variables and "HF_TOKEN" not in variables


def test_command_prints_the_environment_without_a_config(capsys):
    assert main(["--environment"]) == 0
    assert rows(capsys.readouterr().out)["vitkit"].startswith(vitkit.__version__)
