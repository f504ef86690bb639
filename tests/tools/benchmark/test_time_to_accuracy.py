"""Tests of the comparison of detectors by what they reach in a time."""

import json
from pathlib import Path

import pytest

from vitkit.apps.starter.child_runs import StepCost
from vitkit.tools.benchmark import time_to_accuracy
from vitkit.tools.benchmark.time_to_accuracy import DINO, FASTER_RCNN, main


def name_of(folder):
    """Return a run's name without the end that stands for its data and settings."""
    return str(folder.relative_to("runs/time_to_accuracy")).rpartition("-")[0]


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Let runs take no time: DINO's epochs take three minutes, and their AP is a hundredth of the minutes."""
    monkeypatch.chdir(tmp_path)
    Path("w.pth").touch()
    started = []

    def run_arm(command, folder, *, seed, epochs, ablation, device):
        started.append((name_of(folder), epochs))
        assert f"schedule.warmup_epochs={epochs / 20:g}" in command
        metrics = {"bbox/AP": 0.01 * 3 * epochs + 0.01 * seed, "bbox/AP50": 0.9}
        times = dict(minutes=4.0 * epochs, processor_minutes=3.0 * epochs)
        return dict(
            epochs=epochs, steps=100 * epochs, evaluations=[dict(epoch=epochs, metrics=metrics, **times)],
            command=" ".join(command), versions={"torch": "2"}, device=time_to_accuracy.describe_processor(), threads=1,
            **times,
        )  # fmt: skip

    def run_to_end(command, folder):
        started.append((name_of(folder), command[1]))
        assert command[command.index("--weights") + 1] == "w.pth" and "--stride-in-1x1" in command
        folder.mkdir(parents=True, exist_ok=True)
        values = dict(AP=0.1, AP50=0.2, steps=50, epochs=1, processor_minutes=15.0, minutes=16.0)
        (folder / "result.json").write_text(json.dumps(values))

    cost = StepCost(0.04, 0.029, 100)
    monkeypatch.setattr(time_to_accuracy, "run_arm", run_arm)
    monkeypatch.setattr(time_to_accuracy, "run_to_end", run_to_end)
    monkeypatch.setattr(time_to_accuracy, "time_steps", lambda command, folder: cost)
    monkeypatch.setattr(time_to_accuracy, "describe_processor", lambda: "a processor (AVX2)")
    return started


def test_runs_fill_the_time_are_not_repeated_and_the_table_names_the_processor(runs, monkeypatch, capsys):
    args = ["data/bccd", "--weights", "w.pth", "--stride-in-1x1", "--minutes", "15", "30", "--seeds"]
    main([*args, "1"])
    program = "benchmark.faster_rcnn"
    # The first number of epochs follows from timed steps, the second from the first run.
    assert runs == [
        ("a_processor_avx2/dino_r18-15min-1", 5),
        ("a_processor_avx2/faster_rcnn-w-320-15min-1", program),
        ("a_processor_avx2/dino_r18-30min-1", 10),
        ("a_processor_avx2/faster_rcnn-w-320-30min-1", program),
    ]
    runs.clear()
    main([*args, "1", "2"])
    assert runs[0][0] == "a_processor_avx2/dino_r18-15min-2" and len(runs) == 4
    rows = json.loads(Path("runs/time_to_accuracy.json").read_text())
    assert {(row["arm"], row["budget"], row["seed"]) for row in rows} == {
        (arm, minutes, seed) for arm in (DINO, FASTER_RCNN) for minutes in (15, 30) for seed in (1, 2)
    }
    text = Path("runs/time_to_accuracy.md").read_text()
    assert "a processor (AVX2):" in text and "AP 0.575, AP50 0.889 after 51 minutes" in text
    assert f"| 15 | {DINO} | 1, 2 | 500, 500 | 15.0 | 0.165 (0.160, 0.170) | 0.900 (0.900, 0.900) |" in text
    assert f"| 15 | {FASTER_RCNN} | 1, 2 | 50, 50 | 15.0 | 0.100 (0.100, 0.100) |" in text
    assert "| 15 | difference, with Welch's 95 % interval | | | | +0.065 (" in text
    assert "by other settings" not in capsys.readouterr().out
    main(["data/bccd", "--minutes", "15", "--seeds", "1"])
    assert "has it by other settings: python tools/benchmark/faster_rcnn.py" in capsys.readouterr().out
    runs.clear()
    main(["data/bc", *args[1:4], "--minutes", "45", "--seeds", "1"])
    assert runs[0][1] == int(45 / 2.9)  # by timed steps again, not by a run on other data
    monkeypatch.setattr(time_to_accuracy, "describe_processor", lambda: "another (AVX512)")
    runs.clear()
    main([*args[:-1], "--seeds", "1"])
    assert len(runs) == 4 and "another (AVX512):" in Path("runs/time_to_accuracy.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "15", "nan"], "--minutes: 'nan': expected a finite number above 0"),
        (["--minutes", "0"], "--minutes: '0': expected a finite number above 0"),
        (["--size", "0"], "--size: '0': expected an integer of at least 1"),
        (["--weights", "missing.pth"], "--weights: no file 'missing.pth'"),
    ],
)
def test_wrong_options_are_named_before_anything_is_trained(arguments, message, runs, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["data/bccd", *arguments])
    assert message in f"{stopped.value} {capsys.readouterr().err}" and not runs


def test_runs_of_other_data_or_settings_have_folders_of_their_own(runs):
    args = ["--weights", "w.pth", "--stride-in-1x1", "--minutes", "15", "--seeds", "1"]
    folder = Path("runs/time_to_accuracy/a_processor_avx2")
    main(["data/bccd", *args])
    assert len([*folder.glob("faster_rcnn-*")]) == 1
    main(["data/bccd", *args, "--out", "again"])  # the results are lost, and the run is still there
    assert len([*folder.glob("faster_rcnn-*")]) == 1
    main(["data/other", *args, "--out", "other"])
    main(["data/bccd", *args, "--out", "means", "--pixel-mean", "0.4", "0.4", "0.4"])
    assert len([*folder.glob("faster_rcnn-*")]) == 3
