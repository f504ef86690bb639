import contextlib
import io
import logging
import math
import sys
from pathlib import Path

import pytest
import torch
from helpers.clocks import Clock

from vitkit.distributed import RatioMeter
from vitkit.errors import DataError
from vitkit.logging import CONSOLE_NAME, ConsoleCopy, ProgressLines, print_line, setup_logging
from vitkit.text_format import pluralize


def test_ratio_is_that_of_the_sums_not_the_mean_of_ratios():
    meter = RatioMeter()
    meter.add(torch.tensor(1), torch.tensor(1))
    meter.add(torch.tensor(1.0), torch.tensor(3))
    assert meter.compute() == (0.5, 4)
    assert meter.compute() == (0.5, 4)


def test_ratio_without_data_is_nan_also_after_zeros_and_a_reset():
    meter = RatioMeter()
    for prepare in (lambda: None, lambda: meter.add(torch.tensor(0), torch.tensor(0)), meter.reset):
        prepare()
        ratio, count = meter.compute()
        assert math.isnan(ratio) and count == 0


def test_meter_keeps_no_graph_and_continues_from_its_state():
    meter, other = RatioMeter(), RatioMeter()
    meter.add(torch.ones((), requires_grad=True), torch.tensor(2))
    state = meter.state_dict()
    assert not state["sums"].requires_grad
    other.load_state_dict(state)
    meter.add(torch.tensor(5), torch.tensor(5))
    assert other.compute() == (0.5, 2)


def test_large_counts_are_exact():
    meter = RatioMeter()
    meter.add(torch.tensor(2**24), torch.tensor(2**25))
    meter.add(torch.tensor(1), torch.tensor(1))  # lost in 32-bit floats
    assert meter.compute()[1] == 2**25 + 1


def test_messages_go_to_standard_error_once(monkeypatch, capsys):
    logger = logging.getLogger("vitkit")
    for name, value in {"handlers": [], "propagate": True, "level": logging.NOTSET}.items():
        monkeypatch.setattr(logger, name, value)
    setup_logging()
    setup_logging()
    logger.info("weights are random")
    logger.warning("optimizer.lr is high")
    assert capsys.readouterr().err == "weights are random\nwarning: optimizer.lr is high\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_console_output_to_a_full_disk_does_not_end_the_run(monkeypatch, caplog):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        for _ in range(3):
            print_line("epoch 1/3 done")
    assert caplog.messages == ["standard output: no longer written (No space left on device)"]


@pytest.mark.parametrize(
    ("number", "plural", "text"),
    [(1, "classes", "1 class"), (1, "bad boxes", "1 bad box"), (1, "images", "1 image"), (0, "images", "0 images")],
)
def test_a_single_thing_is_not_written_in_the_plural(number, plural, text):
    assert pluralize(number, plural) == text


def test_progress_shows_rate_and_remaining_time(monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr("vitkit.logging.time", clock)
    progress = ProgressLines(4, "images", every=1.0)
    clock.sleep(2.0)
    progress.step()
    assert capsys.readouterr().out == "1/4 images  0.50 it/s  ETA 6 s\n"
    clock.sleep(1.0)
    progress.step()  # the last line is not older than that
    assert capsys.readouterr().out == ""


def test_console_copy_includes_what_was_printed_before_it_started(tmp_path, capsys):
    setup_logging()
    path = tmp_path / CONSOLE_NAME
    path.write_text("an earlier start\n")
    with pytest.raises(DataError), ConsoleCopy() as console:
        print_line("building")
        logging.getLogger("vitkit").warning("be warned")
        assert path.read_text() == "an earlier start\n"
        console.begin(path)
        assert path.read_text().splitlines()[2].endswith("be warned")
        print_line("step 1")
        raise DataError("image 3 is gone")
    print_line("not of the run")
    lines = path.read_text().splitlines()
    assert [line[20:] for line in lines[1:]] == ["building", "be warned", "step 1", "error: image 3 is gone"]
    printed = capsys.readouterr()
    assert printed.out == "building\nstep 1\nnot of the run\n" and printed.err == "warning: be warned\n"


def test_console_copy_includes_what_a_hook_prints(tmp_path, capsys):
    path, before = tmp_path / CONSOLE_NAME, sys.stdout
    with ConsoleCopy() as console:
        print("from the start")
        console.begin(path)
        print_line("short", full="short and long")
        print("a hook", "prints", end=" ")
        sys.stdout.write("100 %\n")
        print("\r 1 of 2", end="")
        print("\r 2 of 2")
        print("not a format: %s %d")
        with contextlib.redirect_stdout(io.StringIO()):
            print("hidden")
    print("not of the run")
    assert sys.stdout is before
    lines = [line[20:] for line in path.read_text().splitlines()]
    copied = ["from the start", "short and long", "a hook prints 100 %", " 2 of 2", "not a format: %s %d"]
    assert lines == copied
    assert capsys.readouterr().out.splitlines()[1:3] == ["short", "a hook prints 100 %"]


def test_another_output_that_a_run_sets_is_kept(tmp_path, monkeypatch):
    other = io.StringIO()
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    with ConsoleCopy():
        sys.stdout = other
    assert sys.stdout is other


def test_console_copy_of_a_run_that_did_not_start_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ConsoleCopy():
        print_line("building")
    assert not list(tmp_path.iterdir())
