"""The command for all that needs a GPU, without one: its parts are replaced by short programs."""

import pytest

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.config import config_names
from vitkit.tools.benchmark import __main__ as benchmark
from vitkit.tools.benchmark import gpu
from vitkit.tools.train import parse_args


def replace_parts(monkeypatch, code):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu, "command", lambda part, out, data: (["timeit", "-n1", "-r1", code], {"PART": part}))


def test_output_of_a_part_is_kept_and_the_part_is_not_repeated(tmp_path, monkeypatch, capfd):
    replace_parts(monkeypatch, "import os; print('ran', os.environ['PART'])")
    gpu.main(["tests", "--out", str(tmp_path / "new")])
    assert "ran tests" in (tmp_path / "new/tests.log").read_text() and "ran tests" in capfd.readouterr().out
    gpu.main(["tests", "golden", "--out", str(tmp_path / "new")])
    out = capfd.readouterr().out
    assert "tests: done before" in out and "ran tests" not in out and "ran golden" in out


def test_failed_part_is_named_and_retried(tmp_path, monkeypatch, capfd):
    replace_parts(monkeypatch, "import sys; sys.exit('broken')")
    for _ in range(2):
        with pytest.raises(SystemExit, match="^failed: tests$"):
            gpu.main(["tests", "--out", str(tmp_path)])
        assert "broken" in capfd.readouterr().out
    replace_parts(monkeypatch, "pass")
    gpu.main(["tests", "--out", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["tests.log"]


def test_part_ends_at_its_time_limit(tmp_path, monkeypatch):
    replace_parts(monkeypatch, "import time; time.sleep(60)")
    assert not gpu.run_part("tests", tmp_path, tmp_path, minutes=0.01)
    assert (tmp_path / "tests.failed.log").read_text() == "not done after 0.01 minutes\n"


def test_parts_are_valid_commands(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    for part in gpu.PARTS:
        (module, *arguments), _ = gpu.command(part, tmp_path, tmp_path)
        if module == "pytest":
            assert all((gpu.ROOT / word).is_dir() for word in arguments if word.startswith("tests/"))
        elif part in gpu.TRAININGS:
            assert parse_args(arguments).config in config_names()
        else:
            assert module == "vitkit.tools.benchmark"
            assert benchmark.parse_args(arguments).parts == [part.partition("_")[0] if part in gpu.LATENCY else part]
    (tmp_path / "bccd").mkdir()
    (tmp_path / "bccd" / gpu.LAST_NAME).touch()
    (_, *arguments), _ = gpu.command("bccd", tmp_path, tmp_path)
    assert parse_args(arguments).resume == tmp_path / "bccd"


def test_error_without_a_gpu_names_what_runs_without(monkeypatch, capsys):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(["tests"])
    assert "PyTorch finds no GPU (VITKIT_GPU_TESTS=cpu pytest -m gpu" in capsys.readouterr().err
