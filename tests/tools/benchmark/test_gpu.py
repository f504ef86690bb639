"""The command for all checks of a GPU, in its smallest form on the CPU."""

import json

import pytest

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.tools.benchmark import gpu, gpu_parts
from vitkit.tools.benchmark.gpu_parts import Options

CPU = ["--device", "cpu", "--tiny"]


def test_part_runs_in_a_separate_process_and_is_not_repeated(tmp_path, capsys):
    out = tmp_path / "new" / "gpu.json"
    gpu.main(["deformable", *CPU, "--out", str(out)])
    (record,) = json.loads(out.read_text())
    assert record["part"] == "deformable" and record["machine"].startswith("CPU, torch") and len(record["rows"]) == 8
    assert all(row["ms"] > 0 for row in record["rows"])
    table = out.with_suffix(".md").read_text()
    assert "| deformable | deformable attention, 5 queries, forward, batch 1, fp32: vitkit | ms" in table
    capsys.readouterr()
    gpu.main(["deformable", *CPU, "--out", str(out)])
    assert capsys.readouterr().out == "deformable: done before (--again measures again)\n"


def test_failed_part_is_recorded_and_retried(tmp_path, monkeypatch):
    out = tmp_path / "gpu.json"
    answers = [
        {"part": "tuning", "error": "exit status 1; see the console"},
        {"part": "tuning", "rows": [{"what": "x"}]},
    ]
    monkeypatch.setattr(gpu, "run_part", lambda part, args: answers.pop(0))
    for _ in range(3):
        gpu.main(["tuning", *CPU, "--out", str(out)])
    assert not answers and len(json.loads(out.read_text())) == 2
    assert "| tuning | exit status 1; see the console |  | **not ok** |" in out.with_suffix(".md").read_text()


def test_part_ends_at_its_time_limit(tmp_path):
    args = gpu.parse_args(["tuning", *CPU, "--out", str(tmp_path / "gpu.json"), "--minutes", "0.001"])
    assert gpu.run_part("tuning", args) == {"part": "tuning", "error": "not done after 0.001 minutes"}


def test_error_without_a_gpu_names_a_remedy(capsys):
    if gpu.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        gpu.main(["tuning"])
    assert "PyTorch finds no GPU (--device cpu --tiny tries the command itself)" in capsys.readouterr().err


def test_training_is_compared_with_the_first_contestant(monkeypatch, tmp_path):
    speeds = {"reference": {"images/s": 2.0, "GiB": 10.0}, "ours": {"images/s": 5.0, "GiB": 7.0}}

    def figures(family, name, case, options):
        if name == "large":
            raise gpu_parts.torch.OutOfMemoryError
        return speeds[name]

    monkeypatch.setattr(gpu_parts, "training_figures", figures)
    family = gpu_parts.Family(dict.fromkeys(("reference", "ours", "large")), num_classes=1)
    options = Options("cuda", False, tmp_path, tmp_path)
    reference, ours, large = gpu_parts.measure_family(family, [gpu_parts.Case(8, 8, 2, True)], options, goal=2.0)
    assert (ours["times as fast"], ours["memory ratio"], ours["ok"]) == (2.5, 0.7, True)
    assert "ok" not in reference and large["out of memory"] is True

    family = gpu_parts.Family(dict.fromkeys(("large", "ours")), num_classes=1)
    _, ours = gpu_parts.measure_family(family, [gpu_parts.Case(8, 8, 16, True)], options, goal=2.0)
    assert ours["images/s"] == 5.0 and "times as fast" not in ours and "ok" not in ours
