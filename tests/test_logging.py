import json
import logging
import math
import sys

import pytest
import torch

from vitkit.logging import LOG_NAME, RatioMeter, RunLog, format_losses, peak_memory_mb, setup_logging

TRAIN = {
    "step": 20, "epoch": 0.5, "loss": 3.5, "losses": {"labels": 1.0, "l1": 2.0, "aux0_labels": 0.5}, "lr": 1e-4,
    "it_s": 4.0, "data_share": 0.25, "memory_mb": 512.0,
}  # fmt: skip
VAL = {"step": 40, "epoch": 1, "metrics": {"bbox/AP": 0.25, "loss": 3.0}}


def write(run_dir):
    with RunLog(run_dir) as log:
        log.train(TRAIN, epoch_label="epoch 0.50/2", eta_seconds=3661)
        log.validation(VAL, epoch_label="epoch 1/2")


def test_ratio_is_of_the_sums_and_not_the_mean_of_ratios():
    meter = RatioMeter()
    meter.add(torch.tensor(1), torch.tensor(1))
    meter.add(torch.tensor(1.0), torch.tensor(3))
    assert meter.compute() == (0.5, 4)
    assert meter.compute() == (0.5, 4)


def test_ratio_of_nothing_is_nan_also_after_zeros_and_a_reset():
    meter = RatioMeter()
    for prepare in (lambda: None, lambda: meter.add(torch.tensor(0), torch.tensor(0)), meter.reset):
        prepare()
        ratio, count = meter.compute()
        assert math.isnan(ratio) and count == 0


def test_meter_keeps_no_graph_and_goes_on_from_its_state():
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


def test_records_are_json_lines_and_a_resumed_run_appends(tmp_path):
    write(tmp_path)
    write(tmp_path)
    records = [json.loads(line) for line in (tmp_path / LOG_NAME).read_text().splitlines()]
    assert records == 2 * [{"kind": "train", **TRAIN}, {"kind": "val", **VAL}]


def test_records_are_on_disk_before_the_run_ends(tmp_path):
    with RunLog(tmp_path) as log:
        log.validation(VAL, epoch_label="")
        assert json.loads((tmp_path / LOG_NAME).read_text())["step"] == 40


def test_console_shows_progress_on_one_line_without_auxiliary_losses(tmp_path, capsys):
    write(tmp_path)
    train_line, val_line = capsys.readouterr().out.splitlines()
    for part in (
        "epoch 0.50/2",
        "loss 3.500 (labels 1.000 l1 2.000)",
        "1.0e-04",
        "4.00 it/s",
        "1:01:01",
        "0.50 GiB",
        "25%",
    ):
        assert part in train_line
    assert "bbox/AP 0.25" in val_line
    assert format_losses({"aux3_l1": 1.0, "l1": 0.5}) == "l1 0.500"


def test_ranks_other_than_the_main_one_write_and_print_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitkit.logging.is_main", lambda: False)
    write(tmp_path)
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_scalars_are_in_tensorboard_where_it_is_installed(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"train/loss", "train/lr", "train/losses/l1", "val/metrics/bbox/AP"} <= set(events.Tags()["scalars"])
    (point,) = events.Scalars("val/metrics/bbox/AP")
    assert (point.step, point.value) == (40, 0.25)


def test_without_tensorboard_the_rest_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOG_NAME]


def test_messages_go_to_standard_error_once(monkeypatch, capsys):
    logger = logging.getLogger("vitkit")
    for name, value in {"handlers": [], "propagate": True, "level": logging.NOTSET}.items():
        monkeypatch.setattr(logger, name, value)
    setup_logging()
    setup_logging()
    logger.warning("optimizer.lr is high")
    assert capsys.readouterr().err == "W optimizer.lr is high\n"


def test_peak_memory_of_the_process_is_in_mebibytes():
    assert 20 < peak_memory_mb(torch.device("cpu")) < 2**20
