"""Sets of runs: resumed, not repeated, with equal cost per arm; and their table and plot."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from vitkit.apps.report.intervals import difference_over_seeds
from vitkit.apps.starter.ablations import page as pages
from vitkit.apps.starter.ablations import runs, sets
from vitkit.config import load_config
from vitkit.errors import TrainingError
from vitkit.tools import ablate, train

SET = """
'''A toy set
of two arms.'''


def ablation():
    return dict(
        base="quickstart/detr", metrics=["bbox/AP50", "loss"], evaluations=2, MINUTES
        settings={
            "data.images_per_gpu": 4, "data.train.num_images": 8, "data.val.num_images": 2, "train.epochs": EPOCHS,
            "data.train.image_size": 32, "data.val.image_size": 32,
        },
        arms={"plain": {}, "no decoder, wide": {"model.head.num_decoder_layers": 1}},
    )
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Write a set file into a new current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(SET.replace("MINUTES", "").replace("EPOCHS", "1"))
    return "toy.py"


def rows_of(folder):
    return json.loads((folder / "model_zoo/ablations/toy.json").read_text())


def test_arms_are_run_once_for_each_seed_and_make_a_table_and_a_plot(toy, tmp_path, monkeypatch, capsys):
    commands = []

    def in_this_process(command, folder):
        if len(commands) == 1:
            assert "| no decoder, wide | not run |" in (tmp_path / "model_zoo/ablations/toy.md").read_text()
        commands.append(command)
        if "train.seed=1" in command and "model.head.num_decoder_layers=1" in command:
            raise TrainingError("lost")
        train.main(command[2:])

    monkeypatch.setattr(runs, "run_to_end", in_this_process)
    assert ablate.main([toy, "train.log_every=1"]) == 1
    assert "no decoder, wide, seed 1: lost" in capsys.readouterr().err
    rows = rows_of(tmp_path)
    assert [(row["arm"], row["seed"]) for row in rows] == [("plain", 0), ("no decoder, wide", 0), ("plain", 1)]
    assert rows[0]["set"] == "toy" and (rows[0]["epochs"], rows[0]["steps"], rows[0]["threads"]) == (1, 2, 1)
    assert rows[0]["processor_minutes"] > 0 and rows[0]["command"].startswith("vitkit train quickstart/detr data.im")
    assert rows[0]["command"].endswith("train.log_every=1 train.epochs=1 train.eval_every=1 train.seed=0")
    assert rows[0]["evaluations"][0]["metrics"].keys() >= {"bbox/AP50", "loss"}
    page = (tmp_path / "model_zoo/ablations/toy.md").read_text()
    losses = [row["evaluations"][0]["metrics"]["loss"] for row in rows]
    mean, spread = (losses[0] + losses[2]) / 2, abs(losses[0] - losses[2]) / 2**0.5
    assert "# toy\n\nA toy set of two arms.\n\n| arm | seeds |" in page
    minutes = [row["processor_minutes"] for row in rows]
    assert (
        f"| plain | 0, 1 | 1 | 2 | {(minutes[0] + minutes[2]) / 2:.1f} | 0.000 ± 0.000 | {mean:.3f} ± {spread:.3f} |"
        in page
    )
    assert f"| no decoder, wide | 0 | 1 | 2 | {minutes[1]:.1f} | 0.000 | {losses[1]:.3f} |" in page
    assert (tmp_path / "model_zoo/ablations/toy.png").stat().st_size > 1000
    assert "over seeds" not in page
    again = [*rows, {**rows[1], "seed": 1, "evaluations": [{"metrics": {"bbox/AP50": 0.5, "loss": losses[1] + 1}}]}]
    again[1] = {**rows[1], "evaluations": [{"metrics": {"bbox/AP50": 0.25, "loss": losses[1]}}]}
    page = pages.table(sets.read_set(tmp_path / toy), tmp_path / toy, again)
    assert "| difference to plain, over seeds | bbox/AP50 | loss |" in page
    value, low, high = difference_over_seeds([0.0, 0.0], [0.25, 0.5])
    assert f"| no decoder, wide | {value:+.3f} ({low:+.3f} to {high:+.3f}) | " in page
    assert "†" not in page
    again[1] = {**again[1], "command": again[1]["command"].replace("num_decoder_layers=1", "num_decoder_layers=2")}
    page = pages.table(sets.read_set(tmp_path / toy), tmp_path / toy, again)
    assert "| no decoder, wide † |" in page and "| plain |" in page and "† measured with earlier settings" in page
    rows[2]["steps"] = 3
    assert "| plain | 0, 1 | 1 | 2, 3 |" in pages.table(sets.read_set(tmp_path / toy), tmp_path / toy, rows)

    commands.clear()
    monkeypatch.setattr(runs, "run_to_end", lambda command, folder: commands.append(command))
    assert ablate.main([toy, "--plot-only"]) == 0
    assert ablate.main([toy, "--seeds", "2", "--budget", "0"]) == 0
    assert ablate.main([toy, "train.log_every=1", "--seeds", "0"]) == 0
    assert "other settings" not in capsys.readouterr().out
    assert ablate.main([toy, "--seeds", "0"]) == 0
    assert "plain, seed 0: model_zoo/ablations/toy.json has it with other settings: vitkit" in capsys.readouterr().out
    assert not commands


def test_seeded_keys_have_the_seed_and_pretraining_is_counted(toy, tmp_path, monkeypatch, capsys):
    text = SET.replace("MINUTES", 'seeded=["data.train.fraction_seed"],').replace(
        "EPOCHS", '1, "data.train.fraction": 0.5'
    )
    (tmp_path / toy).write_text(text.replace("{},", '{"model.backbone.pretrained": "runs/pretrained"},'))
    (tmp_path / "runs/pretrained").mkdir(parents=True)
    log = dict(kind="train", step=9, epoch=1, minutes=30.0, processor_minutes=20.0)
    (tmp_path / "runs/pretrained/log.jsonl").write_text(json.dumps(log) + "\n")
    commands = []

    def in_this_process(command, folder):
        commands.append(command)
        train.main([word for word in command[2:] if "pretrained" not in word])

    monkeypatch.setattr(runs, "run_to_end", in_this_process)
    assert ablate.main([toy, "--seeds", "3"]) == 0
    rows = rows_of(tmp_path)
    assert [row.get("pretraining_minutes") for row in rows] == [20.0, None]
    assert all(
        row["command"].endswith("data.train.fraction_seed=3 train.epochs=1 train.eval_every=1 train.seed=3")
        for row in rows
    )
    assert ablate.main([toy, "--seeds", "3"]) == 0
    assert len(commands) == 2 and "other settings" not in capsys.readouterr().out


def test_shards_share_the_runs_and_are_merged(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "run_to_end", lambda command, folder: train.main(command[2:]))
    out = tmp_path / "model_zoo/ablations"
    assert ablate.main([toy, "--shard", "2/3"]) == ablate.main([toy, "--shard", "1/3"]) == 0
    assert "shard 1 of 3 is done; --plot-only merges" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["toy.1-of-3.json", "toy.2-of-3.json"]
    done = {(row["arm"], row["seed"]) for path in out.iterdir() for row in json.loads(path.read_text())}
    assert done == {("plain", 0), ("no decoder, wide", 0), ("no decoder, wide", 1)}
    assert ablate.main([toy, "--plot-only"]) == 0
    assert {(row["arm"], row["seed"]) for row in rows_of(tmp_path)} == done
    page = (out / "toy.md").read_text()
    assert "| plain | 0 |" in page and "| no decoder, wide | 0, 1 |" in page
    assert ablate.main([toy]) == 0  # the shard that is missing
    assert len(rows_of(tmp_path)) == 4
    with pytest.raises(SystemExit):
        ablate.main([toy, "--shard", "4/3"])
    assert "'4/3': expected I/N with I from 1 to N" in capsys.readouterr().err


def test_a_run_that_was_interrupted_is_resumed(toy, tmp_path, monkeypatch):
    folder = tmp_path / "runs/ablations/toy/plain-0"
    command = sets.train_command(sets.read_set(tmp_path / toy), "plain", [])
    train.main([*command[2:], "train.epochs=1", "train.seed=0", "--run-dir", str(folder)])
    commands = []
    monkeypatch.setattr(runs, "run_to_end", lambda command, folder: commands.append(command))
    ablate.main([toy, "--arms", "plain", "--seeds", "0", "--device", "cpu"])
    assert commands == [["vitkit", "train", "--resume", str(folder.relative_to(tmp_path)), "--device", "cpu"]]
    assert len(rows_of(tmp_path)) == 1


def test_what_lies_in_the_folder_of_a_run_is_not_trusted(toy, tmp_path, monkeypatch):
    folder = tmp_path / "runs/ablations/toy/plain-0"
    folder.mkdir(parents=True)
    (folder / "last.pth").write_bytes(b"weights")
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = load_config("configs/quickstart/detr.py")
    (folder / "config.json").write_text(json.dumps({**config, "imports": ["theirs.py"]}))
    commands = []
    monkeypatch.setattr(runs, "run_to_end", lambda command, folder: commands.append(command))
    with pytest.raises(SystemExit, match=r"neither run nor trusted before:\n.*theirs\.py"):
        ablate.main([toy, "--arms", "plain", "--seeds", "0"])
    assert not (tmp_path / "ran").exists() and not commands


def test_wrong_names_are_refused(toy):
    with pytest.raises(SystemExit, match=r"no set 'detection_bcd'\."):
        ablate.main(["detection_bcd"])
    with pytest.raises(SystemExit, match=r"--arms: no arm 'plane' in toy\.py\. .*plain"):
        ablate.main([toy, "--arms", "plane"])


def test_config_of_every_arm_is_checked_before_the_first_run(tmp_path, toy, monkeypatch):
    (tmp_path / "toy.py").write_text((tmp_path / "toy.py").read_text().replace("head.num_decoder", "hed.num_decoder"))
    monkeypatch.setattr(runs, "run_to_end", pytest.fail)
    with pytest.raises(SystemExit, match=r"^error: arm 'no decoder, wide': .*unknown key 'hed'.*'head'"):
        ablate.main([toy])


@pytest.mark.parametrize("content", ['[{"arm": 3', '[{"arm": 3}]', "3"])
def test_damaged_results_are_named(toy, content, tmp_path):
    (tmp_path / "toy.json").write_text(content)
    with pytest.raises(SystemExit, match=r"^error: .*toy\.json"):
        ablate.main([toy, "--plot-only", "--out", str(tmp_path)])


def test_a_set_without_runs_has_no_page(toy, tmp_path, capsys):
    assert ablate.main([toy, "--plot-only", "--out", str(tmp_path / "new" / "folder")]) == 0
    assert "no run is complete: nothing written" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def test_list_option_prints_sets_and_commands(toy, capsys):
    ablate.main([toy, "--list"])
    assert "model.head.num_decoder_layers=1" in capsys.readouterr().out.splitlines()[1]
    ablate.main([toy, "--list", "--arms", "plain"])
    assert len(capsys.readouterr().out.splitlines()) == 1
    ablate.main(["--list"])
    assert all(len(line.split(maxsplit=1)) == 2 for line in capsys.readouterr().out.splitlines())


@pytest.mark.slow
def test_arms_cost_the_same_and_resume_in_real_processes(tmp_path):
    (tmp_path / "toy.py").write_text(SET.replace("MINUTES", "minutes=0.1,").replace("EPOCHS", "500"))
    command = [sys.executable, "-m", "vitkit.tools.ablate", "toy.py", "--seeds", "0", "data.train.num_images=64"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "runs/ablations/toy/plain-0"
    while not (folder / "log.jsonl").is_file() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert "interrupted; the same command resumes it" in process.communicate()[1]
    assert process.returncode == 1 and not (tmp_path / "model_zoo/ablations/toy.json").exists()
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert len(json.loads((folder / "run.json").read_text())["starts"]) == 2
    rows = rows_of(tmp_path)
    assert [row["arm"] for row in rows] == ["plain", "no decoder, wide"]
    assert all(0.05 < row["processor_minutes"] < 0.2 for row in rows)
