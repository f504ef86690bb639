import time

import pytest
import torch

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.errors import VitkitError
from vitkit.tools import benchmark, benchmark_logging, benchmark_models
from vitkit.tools.benchmark_models import Case
from vitkit.tools.benchmark_timing import Row, compare, peak_memory


def fill(mebibytes):
    return lambda: torch.ones(mebibytes * 2**18).sum()


def test_calls_take_turns_and_the_first_is_the_measure_of_the_others():
    calls = []

    def wait(name, seconds):
        calls.append(name)
        time.sleep(seconds)

    first, second = compare("waiting", {"a": lambda: wait("a", 0.02), "b": lambda: wait("b", 0.06)}, repeats=2)
    assert calls == ["a", "b"] * 3
    assert first.ratio == 1
    assert second.ratio == pytest.approx(3, rel=0.3)
    assert second.seconds == pytest.approx(0.06, rel=0.3)


def test_peak_memory_is_what_a_call_needs_at_most():
    peak = peak_memory(fill, 64)
    if peak is None:
        pytest.skip("the system does not tell its peak memory")
    assert 60 < peak < 90


@pytest.mark.parametrize("contestants", benchmark_models.FAMILIES)
@pytest.mark.parametrize("training", [False, True])
def test_contestants_run(contestants, training):
    pytest.importorskip("transformers")
    case = Case(64, 96, batch_size=1, training=training)
    rows = benchmark_models.measure(contestants, [case], repeats=1, memory=False)
    assert tuple(row.name for row in rows) == contestants
    assert rows[0].ratio == 1
    assert all(row.seconds > 0 for row in rows)


@pytest.mark.parametrize("contestants", benchmark_models.FAMILIES)
def test_both_forms_of_a_model_train_the_same_number_of_parameters(contestants):
    pytest.importorskip("transformers")
    images, boxes, labels = torch.zeros(1, 3, 32, 32), torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.int64)
    trained = []
    for name in contestants[:2]:
        model, _, _ = benchmark_models.BUILDERS[name](Case(32, 32), images, boxes, labels)
        trained.append(sum(p.numel() for p in model.parameters() if p.requires_grad))
    assert trained[0] == trained[1]


def test_missing_transformers_names_the_remedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(VitkitError, match=r"pip install -e '\.\[benchmark\]'"):
        benchmark.measure("models", benchmark.parse_args(["models", "--repeats", "1", "--no-memory"]))


def test_each_part_is_measured_in_a_process_of_its_own_and_written(tmp_path, capsys):
    out = tmp_path / "table.md"
    benchmark.main(["local_relation", "--repeats", "1", "--out", str(out)])
    printed = capsys.readouterr()
    assert printed.err == "measuring local_relation ...\n"
    assert printed.out == out.read_text()
    assert printed.out.count("F.unfold") == 2 and printed.out.count("vitkit |") == 2


def test_an_error_of_a_part_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=f"error: .*{tmp_path}"):
        benchmark.main(["loader", "--images", str(tmp_path)])


def test_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["modles"])
    assert "modles" in capsys.readouterr().err


def test_logging_takes_less_than_a_hundredth_of_training():
    whole, logging, checks = benchmark_logging.measure(steps=50, clock=time.process_time)
    assert whole.ratio == 1 and 0 < logging.ratio < 0.01 and 0 < checks.ratio < 0.1


def test_table_names_each_group_once():
    rows = [Row("inference", "a", 1.0, 1.0, 200.0, 1.0), Row("inference", "b", 0.05, 0.05)]
    assert benchmark.markdown_table(rows).splitlines()[2:] == [
        "| inference | a | 1000 ms | 1.00 | 200 MiB | 1.00 |",
        "|  | b | 50 ms | 0.050 |  |  |",
    ]
