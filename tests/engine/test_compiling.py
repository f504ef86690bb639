"""Messages while torch.compile is running."""

import time
from types import SimpleNamespace

import torch
from torch import nn

from vitkit.engine.hooks import default_hooks
from vitkit.engine.hooks.compiling import CompileLog
from vitkit.engine.settings import TrainSettings


def run_of(model):
    progress = SimpleNamespace(step=0)
    return SimpleNamespace(
        model=model, parameters=list(model.parameters()), device=torch.device("cpu"), progress=progress
    )


def test_slow_first_step_is_announced_monitored_and_timed(capsys):
    run, log = run_of(nn.Linear(1000, 100)), CompileLog(every=0.02)
    with log.during_training(run):
        log.before_epoch(run)
        time.sleep(0.2)
        run.progress.step = 1
        log.after_step(run)
        first = capsys.readouterr().out.splitlines()
        time.sleep(0.2)
        second = capsys.readouterr().out.splitlines()
        log.after_epoch(run)
        time.sleep(0.1)  # an evaluation
        capsys.readouterr()
        time.sleep(0.1)
    assert (
        first[0] == "train.compile: the first step compiles Linear (0.1 M parameters) for cpu, which can take minutes"
    )
    assert first[1].startswith("train.compile: step 1 has taken 0 s so far; Linear (0.1 M parameters) is compiled")
    assert first[-1] == "train.compile: the first step took 0 s"
    assert second and all(line.endswith("is compiled, probably for images of another size") for line in second)
    assert capsys.readouterr().out == ""


def test_only_compiled_runs_announce_their_first_step():
    assert not any(isinstance(hook, CompileLog) for hook in default_hooks(TrainSettings(epochs=1)))
    assert any(isinstance(hook, CompileLog) for hook in default_hooks(TrainSettings(epochs=1, compile=True)))
