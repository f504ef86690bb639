from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.processes import PROCESSES

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.errors import VitkitError
from vitkit.tools.benchmark import __main__ as benchmark
from vitkit.tools.benchmark import clips, timing
from vitkit.tools.benchmark.timing import Measurement, Options, compare, peak_memory


def fill(mebibytes):
    return lambda: torch.ones(mebibytes * 2**18).sum()


def test_calls_alternate_after_a_pause_and_are_compared_with_the_first(monkeypatch):
    calls, now = [], [0.0]
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: wait("pause", seconds))

    def wait(name, seconds):
        calls.append(name)
        now[0] += seconds

    builders = {"a": lambda: partial(wait, "a", 0.02), "b": lambda: partial(wait, "b", 0.06)}
    first, second = compare("waiting", builders, Options(repeats=2, clock=lambda: now[0]), memory=False)
    assert calls == ["pause", "a", "pause", "b"] * 3
    assert first.ratio == 1
    assert second.ratio == pytest.approx(3) and second.seconds == pytest.approx(0.06)


def test_peak_memory_is_the_maximum_during_a_call():
    peak = peak_memory(partial(fill, 64))
    if peak is None:
        pytest.skip("the system does not tell its peak memory")
    assert 60 < peak < 90


def test_missing_transformers_names_the_remedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(VitkitError, match=r"pip install -e '\.\[benchmark\]'"):
        benchmark.measure("detr", benchmark.parse_args(["detr", "--repeats", "1", "--no-memory"]), 1)


def test_each_part_is_measured_in_a_separate_process_and_written(tmp_path, capsys):
    out = tmp_path / "table.md"
    # Memory, which a process of its own measures for each row, is another test's.
    benchmark.main(["local_relation", "--repeats", "1", "--no-memory", "--out", str(out)])
    printed = capsys.readouterr()
    assert printed.err == "measuring local_relation ...\n"
    assert printed.out == out.read_text()
    assert printed.out.count("F.unfold") == 2 and printed.out.count("vitkit |") == 2


def test_error_of_a_part_is_one_line(tmp_path, monkeypatch):
    # A fork that has imported torch shows it as well.
    monkeypatch.setattr(benchmark, "multiprocessing", SimpleNamespace(get_context=lambda _: PROCESSES))
    with pytest.raises(SystemExit, match=f"error: .*{tmp_path}"):
        benchmark.main(["loader", "--images", str(tmp_path)])


def test_table_that_cannot_be_written_is_an_error_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="--out .*table.md: cannot be written"):
        benchmark.main(["local_relation", "--out", str(tmp_path / "file" / "table.md")])
    assert not capsys.readouterr().err


def test_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["dert"])
    assert "dert" in capsys.readouterr().err


def test_table_names_each_group_once():
    rows = [Measurement("inference", "a", 1.0, 1.0, 200.0, 1.0), Measurement("inference", "b", 0.05, 0.05)]
    assert benchmark.markdown_table(rows).splitlines()[2:] == [
        "| inference | a | 1000 ms | 1.00 | 200 MiB | 1.00 |",
        "|  | b | 50 ms | 0.050 |  |  |",
    ]


def test_ratios_have_the_extremes_of_their_rounds():
    ratios = [timing.ratios_to([1.0, 2.0, 1.0], seconds) for seconds in ([0.6, 1.1, 0.5], [1.0, 2.0, 1.0])]
    rows = [Measurement("step", "a", 1.0, None)._replace(**values) for values in ratios]
    assert [benchmark.format_ratio(row) for row in rows] == ["0.55 (0.50 to 0.60)", "1.00"]
    small = rows[0]._replace(ratio=0.0504, lowest_ratio=0.0499, highest_ratio=0.1)
    assert benchmark.format_ratio(small) == "0.050 (0.050 to 0.100)"
    assert benchmark.format_ratio(small._replace(ratio=None)) == ""


def test_ratios_of_other_kinds_are_in_tables_of_their_own(tmp_path, monkeypatch, capsys):
    rows = {
        "latency": [Measurement("N", "vitkit", 1.0, 0.8, published_ap=42.8)],
        "local_relation": [Measurement("relation", "original", 1.0, 1.0), Measurement("relation", "vitkit", 0.5, 0.5)],
    }
    monkeypatch.setattr(benchmark, "measure", lambda part, args, threads: rows[part])
    process = SimpleNamespace(submit=lambda function, *args: SimpleNamespace(result=lambda: function(*args)))
    monkeypatch.setattr(benchmark, "ProcessPoolExecutor", lambda *_: nullcontext(process))
    out = tmp_path / "table.md"
    benchmark.main(["latency", "local_relation", "--threads", "1", "2", "--rows", "vitkit", "--out", str(out)])
    first, second = out.read_text().split("\n\n")[1:]
    assert first.startswith("| | | COCO AP | time | of transformers' fastest |") and first.count("42.8") == 2
    assert second.startswith("| | | time | ratio | peak memory | ratio |") and second.count("original") == 2


def test_a_part_of_the_cpu_in_float32_refuses_others(monkeypatch, capsys):
    option = ["--precision", "bf16"]
    monkeypatch.setattr(benchmark, "describe_machine", lambda args: "")
    with pytest.raises(SystemExit, match="error: fused: is measured on the CPU in float32; got --device"):
        benchmark.main(["fused", *option])
    monkeypatch.setattr(benchmark, "PARTS", {"fused": "fused"})  # all parts are asked for
    benchmark.main(option)
    assert capsys.readouterr().err == "no rows of fused, which is measured on the CPU in float32\n"


def test_clip_models_are_compared_with_models_of_the_same_size():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        pairs = ((clips.transformers_timesformer, "timesformer_divided"), (clips.torchvision_mvit, "mvitv2_s_16x4"))
        for build, name in pairs:
            theirs, ours = (sum(p.numel() for p in model.parameters()) for model in (build(), clips.vitkit_model(name)))
            assert theirs == ours, name
