"""Signals that ask a run to end early."""

import signal
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from helpers.clocks import Clock
from torch import nn

from vitkit.engine.hooks.saving import Interrupted, Signals


@contextmanager
def listening():
    signals, run = Signals(), SimpleNamespace(model=nn.Linear(1, 1), guard=SimpleNamespace(stop_signal=None))
    with signals.during_training(run):
        yield signals, run


def test_second_interrupt_stops_at_once_unless_it_was_only_forwarded(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("vitkit.engine.hooks.saving.time", clock)
    before = signal.getsignal(signal.SIGINT)  # ignored where a shell runs the tests in its background
    with listening() as (_, run):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert run.guard.stop_signal == signal.SIGINT
        clock.sleep(2)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_stop_request_interrupts_an_evaluation():
    with listening() as (signals, run):
        with pytest.raises(Interrupted), signals.during_evaluation(run):
            signal.raise_signal(signal.SIGTERM)
            time.sleep(5)
        with pytest.raises(Interrupted), signals.during_evaluation(run):
            raise AssertionError("it was asked to stop before")
    assert run.guard.stop_signal == signal.SIGTERM


def test_stop_request_waits_for_the_evaluation_of_a_sharded_model(monkeypatch):
    monkeypatch.setattr("vitkit.engine.hooks.saving.is_sharded", lambda model: True)
    with listening() as (signals, run), signals.during_evaluation(run):
        signal.raise_signal(signal.SIGTERM)
    assert run.guard.stop_signal == signal.SIGTERM
