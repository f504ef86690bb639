"""What may change when a run is resumed, and how a restarted launch finds its run."""

from pathlib import Path

import pytest

from vitkit.engine.run_folder import current_launch, find_repeated_run, mark_launch, report_changes, resume_command
from vitkit.errors import ConfigError


def test_changed_settings_are_reported_with_their_effect(tmp_path, caplog):
    saved = {
        "train": {"log_every": 50, "clip_grad_norm": 0.1, "epochs": 2},
        "optimizer": {"type": "AdamW", "lr": 1e-4},
        "data": {"root": "data"},
    }
    config = {**saved, "train": {"log_every": 20, "seed": 1, "epochs": 3}, "data": {"root": "data", "num_workers": 4}}
    report_changes(tmp_path, saved, config)
    assert caplog.messages == [
        "resuming with a changed data.num_workers: not set -> 4 (allowed; each step trains as before)",
        "resuming with a changed train.clip_grad_norm: 0.1 -> not set (allowed; later steps differ from the original "
        "run's)",
        "resuming with a changed train.epochs: 2 -> 3 (allowed; what follows the run's length, such as a cosine "
        "schedule, follows the new one)",
        "resuming with a changed train.log_every: 50 -> 20 (allowed; each step trains as before)",
        "resuming with a changed train.seed: not set -> 1 (allowed; later steps differ from the original run's)",
    ]
    with pytest.raises(ConfigError, match=r"lr cannot change when a run is resumed \(optimizer\.lr: 0\.0001 -> 1\.0\)"):
        report_changes(tmp_path, saved, {**saved, "optimizer": {"type": "AdamW", "lr": 1.0}})
    slow, slower = ({"optimizer": {"lr_multipliers": {"head.decoder.": rate}}} for rate in (0.7, 0.1))
    with pytest.raises(ConfigError, match=r"lr_multipliers\.head\.decoder\.: 0\.7 -> 0\.1"):
        report_changes(tmp_path, slow, slower)


def mark_as_ended(folder, launches):
    """Mark a run's folder as a process did that has ended."""
    mark_launch(folder, launches)
    mark = folder / ".launch"
    if mark.exists():
        mark.write_text(mark.read_text().replace("process ", "ended process "))


def test_repeated_launch_recognizes_only_its_own_run(tmp_path, monkeypatch):
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("detr", "detr-2"):
        (tmp_path / name).mkdir()

    def found(run_dir=None):
        return find_repeated_run([current_launch()], run_dir=run_dir, default=tmp_path / "detr")

    mark_as_ended(tmp_path / "detr", [current_launch()])
    assert found() is None
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    mark_as_ended(tmp_path / "detr-2", [current_launch()])
    assert found() is None  # a second command of one job
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert found() == tmp_path / "detr-2" and found(tmp_path / "detr") == tmp_path / "detr"
    mark_as_ended(tmp_path / "detr-2", [current_launch()])
    assert found() is None  # the first command has resumed its run; this is the second
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert found() == tmp_path / "detr-2"
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    assert found() is None
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name)
    alone = current_launch()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert found() is None and found(tmp_path / "detr") is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert found(tmp_path / "detr") is None  # another run's folder, which was refused before
    mark_as_ended(tmp_path / "detr", [alone, current_launch()])
    # The same agent restarts its ranks without counting a restart, because a process on another machine failed.
    assert found() == found(tmp_path / "detr") == tmp_path / "detr"
    assert resume_command(tmp_path / "a run").startswith("torchrun --nproc-per-node 8 ")
    assert resume_command(tmp_path / "a run").endswith(f"--resume '{tmp_path / 'a run'}'")


def test_runs_of_other_configs_and_of_this_process_are_not_repeated_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for name in ("detr_r50", "detr-2", "detr-10"):
        (tmp_path / name).mkdir()

    def found():
        return find_repeated_run([current_launch()], run_dir=None, default=tmp_path / "detr")

    mark_as_ended(tmp_path / "detr_r50", [current_launch()])
    assert found() is None
    for name in ("detr-10", "detr-2"):
        mark_as_ended(tmp_path / name, [current_launch()])
    assert found() == tmp_path / "detr-2"
    # A Python program trains the same config several times; restarted, it comes to its second run after its first.
    mark_launch(tmp_path / "detr-2", [current_launch()])
    assert found() == tmp_path / "detr-10"
    mark_launch(tmp_path / "detr-10", [current_launch()])
    assert found() is None


def test_resume_command_names_the_program_that_was_started(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    is_installed = True
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if is_installed else None)

    def command(program: str) -> str:
        monkeypatch.setattr("sys.argv", [program])
        return resume_command(Path("runs/a run"), "--device", "cpu")

    assert command("../vitkit/tools/train.py") == "python ../vitkit/tools/train.py --resume 'runs/a run' --device cpu"
    for program in ("vitkit train", "vitkit start"):
        assert command(program) == "vitkit train --resume 'runs/a run' --device cpu"
    assert command("my_script.py") == "python -m vitkit.tools.train --resume 'runs/a run' --device cpu"
    is_installed = False
    assert command("vitkit train") == "python -m vitkit.tools.train --resume 'runs/a run' --device cpu"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert command("vitkit train").startswith("torchrun --nproc-per-node 2 -m vitkit.tools.train --resume ")
