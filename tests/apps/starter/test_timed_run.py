"""A run keeps to its time, whatever a step turns out to take."""

from types import SimpleNamespace

import pytest
from helpers.toy_training import records, run

from vitkit.apps.starter import timed_run
from vitkit.apps.starter.timed_run import Pace, note_if_busy
from vitkit.engine.hooks import Hook


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; a process gets `share` of a core of the time that passes."""
    clock = SimpleNamespace(now=1000.0, share=1.0, processor=0.0)

    def wait(seconds):
        clock.now += seconds
        clock.processor += clock.share * seconds

    clock.wait = wait
    fake = SimpleNamespace(monotonic=lambda: clock.now, process_time=lambda: clock.processor)
    monkeypatch.setattr(timed_run, "time", fake)
    return clock


class Steps(Hook):
    """Lets each step take some seconds; `seconds` maps the step's number to them."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def after_step(self, run, step):
        self.clock.wait(self.seconds(run.progress.step))


def train(folder, clock, seconds, pace, *, epochs, evaluation=5.0, resume=None, **others):
    """Train epochs of 8 steps; evaluations take 5 seconds."""

    def evaluate(model):
        clock.wait(evaluation)
        return {"score": 0.5}

    hooks = [Steps(clock, seconds), pace]
    settings = dict(epochs=epochs, eval_every=2, best_metric="score", schedule=dict(epochs=epochs), **others)
    return run(folder, added_hooks=hooks, evaluate=evaluate, resume=resume, **settings)[1]


def test_a_plan_that_holds_is_trained_to_its_end(tmp_path, clock):
    pace = Pace(clock.now + 100, 100)
    progress = train(tmp_path / "run", clock, lambda step: 1.0, pace, epochs=8)
    assert progress.epoch == 8 and progress.step == 64 and pace.epochs is None
    assert clock.now == 1000 + 64 + 4 * 5 and pace.step_seconds == 1 and pace.evaluation_seconds == 5


def test_a_step_of_several_batches_is_one_of_fewer_steps(tmp_path, clock):
    pace = Pace(clock.now + 100, 100)
    progress = train(tmp_path / "run", clock, lambda step: 2.0, pace, epochs=8, accumulate=2, batches_per_epoch=8)
    assert progress.epoch == 8 and progress.step == 8 * 4 and pace.epochs is None


def test_slow_steps_are_planned_again_after_an_epoch(tmp_path, clock):
    pace = Pace(clock.now + 110, 110, evaluation_seconds=5.0)
    progress = train(tmp_path / "run", clock, lambda step: 3.0, pace, epochs=8)
    assert progress.epoch == 1 and clock.now == 1024
    # 86 seconds are left, less 12.5 for what follows and 3 evaluations: 58.5, for epochs of 24.
    assert pace.epochs == 3 and not records(tmp_path / "run", "val")
    last = tmp_path / "run/last.pth"
    while pace.epochs is not None:
        epochs, pace = pace.epochs, Pace(1110, 110, evaluation_seconds=pace.evaluation_seconds)
        progress = train(tmp_path / "run", clock, lambda step: 3.0, pace, epochs=epochs, resume=last)
    assert 1080 < clock.now <= 1110 - 5
    assert records(tmp_path / "run", "val")[-1]["step"] == progress.step


def test_fast_steps_are_planned_again(tmp_path, clock):
    pace = Pace(clock.now + 200, 200, evaluation_seconds=5.0)
    train(tmp_path / "run", clock, lambda step: 1.0, pace, epochs=4)
    assert pace.epochs == 1 + int((200 - 8 - 12.5 - 5) / 8)


def small_first(share):
    return 0.5 if share < 0.5 else 1.5


def test_larger_images_later_are_part_of_the_plan(tmp_path, clock):
    pace = Pace(clock.now + 100, 100, relative_cost=small_first)
    progress = train(tmp_path / "run", clock, lambda step: 0.5 if step <= 32 else 1.5, pace, epochs=8)
    assert progress.epoch == 8 and pace.epochs is None and pace.step_seconds == pytest.approx(1)


def test_larger_images_later_are_part_of_a_new_plan(tmp_path, clock):
    pace = Pace(clock.now + 200, 200, evaluation_seconds=5.0, relative_cost=small_first)
    train(tmp_path / "run", clock, lambda step: 1.5, pace, epochs=8)
    # After 12 seconds 188 are left, less 12.5 for what follows and 3 evaluations: 160.5. An epoch takes 24 on average;
    # of 7, three more with small images take 12 each and three with large ones, from the share of 0.5 on, 36.
    assert pace.step_seconds == pytest.approx(3) and pace.epochs == 6
    seconds = [sum(24 * small_first((k + 0.5) / epochs) for k in range(1, epochs)) for epochs in (6, 7)]
    assert seconds[0] <= 160.5 < seconds[1]


def test_the_deadline_ends_an_epoch_with_an_evaluated_model(tmp_path, clock, capsys):
    pace = Pace(clock.now + 60, 60, evaluation_seconds=5.0)
    progress = train(tmp_path / "run", clock, lambda step: 1.0 if step < 3 else 10.0, pace, epochs=1)
    assert progress.step == 6 and pace.epochs is None
    assert "ending with step 6, as the time is over" in capsys.readouterr().out
    assert len(records(tmp_path / "run", "val")) == 1 and (tmp_path / "run/best.pth").is_file()
    assert clock.now <= 1060 - 5  # one for the report


def test_no_epoch_begins_for_which_there_is_no_time(tmp_path, clock, capsys):
    pace = Pace(clock.now + 104, 104, evaluation_seconds=5.0)
    progress = train(tmp_path / "run", clock, lambda step: 10.0, pace, epochs=8)
    assert progress.epoch == 1 and len(records(tmp_path / "run", "val")) == 1
    assert "ending with epoch 1, as there is no time for another one" in capsys.readouterr().out


def test_a_run_that_gets_little_of_a_core_says_so(tmp_path, clock, capsys):
    clock.share = 0.1
    train(tmp_path / "run", clock, lambda step: 1.0, Pace(clock.now + 100, 100), epochs=8)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("busy: ")]
    assert 3 < len(lines) < 8
    assert lines[0] == (
        "busy: the run gets 0.1 of a core, as other programs are busy: end them, if you can; a step takes 1.00 s"
    )
    assert note_if_busy(1.0, 0.6) == note_if_busy(0.0, 0.0) == ""
