from pathlib import Path

import pytest

from vitkit.apps.starter.own_data import OwnData
from vitkit.apps.starter.recipes import RECIPES

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("network", "steps", "metrics"),
    [
        ("small", 10, "AP 0.488, AP50 0.784"),
        ("small", 1647, "AP 0.488, AP50 0.784"),
        ("small", 1648, "AP 0.577, AP50 0.856"),
        ("small", 10**6, "AP 0.633, AP50 0.896"),
        ("resnet50", 2500, "AP 0.601, AP50 0.874"),
        ("res3", 2500, "AP 0.585, AP50 0.879"),
    ],
)
def test_measured_figure_with_the_most_steps_of_at_most_the_chosen_ones_is_shown(network, steps, metrics):
    few, many = (OwnData("", 17, 7, 64, [], fewest_objects=count) for count in (99, 100))
    recipe = RECIPES["detection"]
    expectation = recipe.expectation(network, steps, 0.01, many)
    assert expectation.startswith(metrics) and "COCO" not in expectation
    assert recipe.expectation(network, steps, 0.01, few) == f"{expectation}: {recipe.few_objects}"
    assert "recipe has not been measured" in RECIPES["classification"].expectation(network, steps, 0.01, few)


def test_minutes_of_the_expected_figure_are_those_of_this_machine():
    data = OwnData("", 17, 7, 64, [], fewest_objects=100)
    fast, slow = (RECIPES["detection"].expectation("small", 3000, pace / 60, data) for pace in (0.36, 0.94))
    assert fast.startswith("AP 0.603, AP50 0.880 after 2472 steps, which take 15 min here, as on 205 photos")
    assert slow == fast.replace("15 min", "39 min") and slow.endswith(
        "; less with more classes, or with fewer objects of each"
    )
    too_few = RECIPES["detection"].expectation("small", 30, 0.94 / 60, data)
    assert "after 824 steps, which take 13 min here" in too_few and "; less after only 30 steps, with more" in too_few


def test_recipe_for_many_objects_is_the_best_of_the_table_for_short_runs():
    step_costs = {"res3": 1.0, "resnet50": 1.9}  # configs/bccd/dino_imagenet.py
    measured = RECIPES["detection"].measured
    for figure in measured:
        if figure.network == "res3" and figure.steps < 2472:
            # Those of the small network are measured with sampling by pixels, which is worth more than weights.
            others = [f for f in measured if f.network == "resnet50"]
            others = [f for f in others if f.steps * step_costs[f.network] <= figure.steps]
            assert all(figure.metrics > other.metrics for other in others)


def test_figures_of_recipes_are_those_of_the_table():
    rows = (ROOT / "configs/bccd/measurements.md").read_text().splitlines()
    names = {"small": "| `dino_r18.py`", "resnet50": "| the same on a ResNet-50 up to res4", "res3": "| "}
    for figure in RECIPES["detection"].measured:
        values = figure.metrics.removeprefix("AP ").replace(", AP50 ", " / ")
        values += f" ({figure.steps}; "
        assert any(row.startswith(names[figure.network]) and values in row for row in rows)
    header = (ROOT / "configs/start/detection.py").read_text()
    facts = ("AP50 0.008 to 0.045", "50 photos of COCO with 49 classes", "936 steps")
    assert all(fact in RECIPES["detection"].few_objects and fact in header for fact in facts)
    (figure,) = RECIPES["semantic"].measured
    header = (ROOT / "configs/start/semantic.py").read_text()
    assert all(text in header for text in (f"{figure.steps} steps", "53 min", "mIoU 0.677"))
    assert figure.metrics == "mIoU 0.677"
