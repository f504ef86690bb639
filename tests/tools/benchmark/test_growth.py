"""How time and memory grow, with a few images."""

from pathlib import Path

import pytest

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.tools.benchmark import growth
from vitkit.tools.benchmark.growth import Growth

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")


@pytest.mark.parametrize("part", growth.PARTS)
def test_each_part_runs(part):
    result = growth.measure(part, 9)
    assert result.seconds > 0 and result.peak > result.grown >= 0


def test_exponent_is_the_slope_of_the_logarithms():
    sizes = (1_000, 3_000, 10_000)
    assert growth.exponent(sizes, [2.0 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    results = [Growth(size / 1000, 800 * growth.MIB, 10 * size) for size in sizes]
    assert growth.row("predict", sizes, results) == (
        "| predict | 1.00 / 3.00 / 10.00 | 1.00 | 800 / 800 / 800 | 0.00 | 0.0 / 0.0 / 0.1 | 10 |"
    )


def test_wrong_sizes_are_named(capsys):
    with pytest.raises(SystemExit):
        growth.parse_args(["predict", "--sizes", "100", "10"])
    assert "--sizes: got [100, 10]; expected two numbers or more, ascending" in capsys.readouterr().err
