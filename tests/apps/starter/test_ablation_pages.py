"""The table and the plot of a set of runs."""

import re
import shlex

import pytest

from vitkit.apps.starter.ablations import page as pages
from vitkit.apps.starter.ablations import sets
from vitkit.errors import ConfigError


def test_curves_are_of_the_last_evaluation_of_arms(tmp_path):
    arms = {"ViT, half": {}, "ViT, all": {}, "Swin, all": {}}
    curves = {"ViT": {50: "ViT, half", 100: "ViT, all"}, "Swin": {100: "Swin, all"}}
    ablation = sets.Ablation("base", ["top1"], arms, curves=curves, x_label="images")
    values = [("ViT, half", 0, 0.2), ("ViT, all", 0, 0.5), ("ViT, half", 1, 0.4)]
    rows = [
        {"arm": arm, "seed": seed, "evaluations": [{"metrics": {"top1": 0.0}}, {"metrics": {"top1": value}}]}
        for arm, seed, value in values
    ]
    assert pages.collect_last_values(ablation, rows) == {"ViT": {50: [0.2, 0.4], 100: [0.5]}, "Swin": {}}
    pages.plot(ablation, rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_goal_is_read_off_between_the_measured_points(tmp_path, monkeypatch):
    (tmp_path / "few.py").write_text(
        """'Labels.'
def ablation():
    starts, counts = ("random", "pretrained", "other", "missing"), (10, 20, 40, 80)
    return dict(
        base="b", metrics=["AP"], arms={f"{s}, {n}": {} for s in starts for n in counts},
        curves={s: {n: f"{s}, {n}" for n in counts} for s in starts}, x_label="photos", goal=("random", 80),
    )
"""
    )
    ablation = sets.read_set(tmp_path / "few.py")
    run = dict(epochs=1, steps=1, processor_minutes=2.0, versions={}, threads=1, device="cpu")

    def runs(start, points, **record):
        return [
            run
            | record
            | dict(arm=f"{start}, {n}", seed=seed, evaluations=[dict(epoch=1, metrics=dict(AP=value))])
            | dict(command=shlex.join(pages.train_command(ablation, f"{start}, {n}", ())))
            for n, values in points.items()
            for seed, value in enumerate(values)
        ]

    rows = runs("random", {10: [0.1], 40: [0.25], 80: [0.3, 0.4, 0.5]})
    rows += runs("pretrained", {10: [0.2], 20: [0.3], 80: [0.5, 0.6]}, pretraining_minutes=60.0)
    page = pages.table(ablation, tmp_path / "few.py", [*rows, *runs("other", {20: [0.4]})])
    assert "Goal: the AP of random at 80 photos: 0.400." in page
    assert "| photos | random | pretrained | other | missing |\n| --- | ---: | ---: | ---: | ---: |\n" in page
    assert "| 20 | not run | 0.300 | 0.400 | not run |" in page
    # Student's t of two degrees of freedom is 4.303, of one 12.706.
    assert "| 80 | 0.400 (0.152 to 0.648) | 0.550 (-0.085 to 1.185) | not run | not run |" in page
    assert "| processor minutes | 2.0 | 2.0 | 2.0 |  |\n| with pretraining | 2.0 | 62.0 | 2.0 |  |" in page
    # Two fifths of the way from 20 to 80 on a logarithmic axis, as 0.4 is on that from 0.3 to 0.55.
    assert f"| mean reaches the goal at | 80 | {20 * 4**0.4:.0f} | ≤ 20 | not run |" in page
    # Half as much again in the mean, but with two runs and three their intervals overlap.
    assert "| shown above the goal at | not shown | not shown | not shown | not run |" in page
    surely = pages.table(ablation, tmp_path / "few.py", [*rows, *runs("other", {20: [0.9], 40: [0.9, 0.91]})])
    assert "| shown above the goal at | not shown | not shown | 40 | not run |" in surely
    assert "| pretrained, 10 | 0 | 1 | 1 | 2.0 | 60.0 | 0.200 |" in page
    assert "| difference to random, 80, over seeds | AP |\n| --- | ---: |\n| pretrained, 80 | +0.150 (" in page
    without_goal = pages.table(ablation, tmp_path / "few.py", rows[:2])
    assert "at 80 photos: not run." in without_goal and "reaches the goal" not in without_goal
    worse = pages.table(ablation, tmp_path / "few.py", [*rows[:5], *runs("other", {10: [0.1], 20: [0.2]})])
    assert "| mean reaches the goal at | 80 | not run | > 20 | not run |" in worse

    figures = []
    monkeypatch.setattr(
        "vitkit.apps.starter.ablations.page.save_figure", lambda figure, *args, **_: figures.append(figure)
    )
    pages.plot(ablation, rows, tmp_path / "few.png")
    assert any(list(line.get_ydata()) == [0.4, 0.4] for line in figures[0].axes[0].get_lines())
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["random", "pretrained"]

    text = (tmp_path / "few.py").read_text()
    (tmp_path / "few.py").write_text(text.replace('("random", 80)', '("random", 5)'))
    with pytest.raises(ConfigError, match=r"few\.py: goal=\('random', 5\): expected the name of one of the curves"):
        sets.read_set(tmp_path / "few.py")


def test_seeds_with_other_numbers_of_evaluations_are_averaged_from_the_last_one():
    def row(seed, *values):
        points = [dict(epoch=4 - len(values) + i, metrics={"AP": value}) for i, value in enumerate(values, 1)]
        return dict(arm="DINO", seed=seed, evaluations=points)

    ablation = sets.Ablation("base", ["AP"], {"DINO": {}})
    curves = pages.collect_values_over_training(ablation, [row(0, 0.1, 0.2, 0.3), row(1, 0.4, 0.5)], "epoch")
    assert curves == {"DINO": {3: [0.2, 0.4], 4: [0.3, 0.5]}} and list(curves["DINO"]) == [3, 4]


@pytest.mark.parametrize(("epochs", "label"), [(4, "epoch"), (6, "processor minutes")])
def test_arms_of_other_epochs_are_plotted_over_time(epochs, label, tmp_path, monkeypatch):
    def row(arm, epochs):
        point = dict(epoch=epochs, processor_minutes=1.5, metrics={"AP": 0.4})
        return dict(arm=arm, seed=0, epochs=epochs, evaluations=[point])

    figures = []
    monkeypatch.setattr(
        "vitkit.apps.starter.ablations.page.save_figure", lambda figure, *args, **_: figures.append(figure)
    )
    ablation = sets.Ablation("base", ["AP"], {"large": {}, "small": {}})
    pages.plot(ablation, [row("large", 4), row("small", epochs)], tmp_path / "sizes.png")
    assert figures[0].axes[0].get_xlabel() == label


def test_power_laws_of_curves_are_in_the_table_and_the_plot(tmp_path, monkeypatch):
    text = """'Losses.'
def ablation():
    widths, lines = ("narrow", "wide", "flat", "short"), (100, 200, 400, 800)
    return dict(
        base="b", metrics=["nll"], arms={f"{w}, {n}": {} for w in widths for n in lines},
        curves={w: {n: f"{w}, {n}" for n in lines} for w in widths}, x_label="lines", power_law=True,
    )
"""
    (tmp_path / "losses.py").write_text(text)
    ablation = sets.read_set(tmp_path / "losses.py")
    losses = {"narrow": lambda n: 5 * n**-0.25, "wide": lambda n: 3 * n**-0.5, "flat": lambda n: 1.0}
    losses["short"] = losses["wide"]
    run = dict(epochs=1, steps=1, processor_minutes=0.1, versions={}, threads=1, device="cpu")

    def command(arm):
        return shlex.join(pages.train_command(ablation, arm, ()))

    rows = [
        run
        | {
            "arm": arm,
            "seed": seed,
            "command": command(arm),
            "evaluations": [{"metrics": {"nll": losses[width](n) * factor}}],
        }
        for width, points in ablation.curves.items()
        for n, arm in points.items()
        for seed, factor in enumerate((0.99, 1 / 0.99))
        if width != "short" or n < 400
    ]
    page = pages.table(ablation, tmp_path / "losses.py", rows)
    assert "Power laws of nll, a x^-b; x is lines:\n\n- narrow: 5 x^-b, b = 0.250 (95 % interval 0.2" in page
    assert "- wide: 3 x^-b, b = 0.500 (95 % interval 0.4" in page and "8 points)" in page
    assert "- flat: no power law: it does not surely fall, exponent 0.000 (95 % interval -0.0" in page
    assert "- short: a power law needs points at three or more x; got 2" in page

    figures = []
    monkeypatch.setattr(
        "vitkit.apps.starter.ablations.page.save_figure", lambda figure, *args, **_: figures.append(figure)
    )
    pages.plot(ablation, rows, tmp_path / "losses.png")
    (axes,) = figures[0].axes
    labels = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert labels[0].startswith("narrow: 5 $x^{-0.25 \\pm 0.0") and labels[2:] == ["flat", "short"]
    line = next(line for line in axes.get_lines() if line.get_label() == labels[1])
    assert line.get_ydata()[[0, -1]] == pytest.approx([3 * 100**-0.5, 3 * 800**-0.5])

    (tmp_path / "losses.py").write_text(text.replace("curves=", "settings="))
    with pytest.raises(ConfigError, match=r"losses\.py: power_law is fitted to curves; give curves="):
        sets.read_set(tmp_path / "losses.py")


FRONTIER = """'Losses.'
def ablation():
    sizes, tokens = (10**5, 10**6, 10**7), (10**6, 10**7, 10**8)
    return dict(
        base="b", metrics=["nll"], arms={f"{n} by {d}": {} for n in sizes for d in tokens},
        frontier={f"{n} by {d}": (n, d) for n in sizes for d in tokens}, least_loss=1.0,
    )
"""


def test_compute_frontier_is_on_the_page_and_in_a_plot_of_its_own(tmp_path):
    (tmp_path / "losses.py").write_text(FRONTIER)
    ablation = sets.read_set(tmp_path / "losses.py")
    run = dict(epochs=1, steps=1, processor_minutes=0.1, versions={}, threads=1, device="cpu", command="")
    evaluations = dict(epoch=1, processor_minutes=0.1)

    def loss(n, d):
        return 1.5 + 99 * n**-0.4 + 99 * d**-0.4

    rows = [
        run | dict(arm=arm, seed=seed, evaluations=[evaluations | dict(metrics=dict(nll=factor * loss(n, d)))])
        for arm, (n, d) in ablation.frontier.items()
        for seed, factor in enumerate((0.999, 1.001))
    ]
    pages.write_page(ablation, tmp_path / "losses.py", rows, tmp_path)
    page = (tmp_path / "losses.md").read_text()
    assert (
        "nll by parameters N, without embeddings, and training tokens D: L = 1.5 + " in page and "18 points)." in page
    )
    assert "The best N grows as C^0.50 (0.4" in page and "![The compute frontier](losses_frontier.png)" in page
    # 6 N D = 6e11 and equal terms: N = D = 316,228, fewer tokens than those of the runs.
    assert re.search(r"\| 6e\+11 † \| 31[567],\d{3} \(3", page)
    assert "form does not hold" not in page and "E is at its least" not in page
    assert (tmp_path / "losses_frontier.png").stat().st_size > 1000
    pages.write_page(ablation, tmp_path / "losses.py", rows[:8], tmp_path / "few")
    page = (tmp_path / "few" / "losses.md").read_text()
    assert (
        "training tokens D: L(N, D) needs runs of 3 or more N, 3 or more D and 7 or more pairs of them; got 2, 3"
        in page
    )
    assert not (tmp_path / "few" / "losses_frontier.png").exists()
    (tmp_path / "losses.py").write_text(FRONTIER.replace('frontier={f"{n} by', 'frontier={f"{n} on'))
    with pytest.raises(ConfigError, match=r"losses\.py: frontier: no arm '100000 on 1000000'\. Did you mean "):
        sets.read_set(tmp_path / "losses.py")


@pytest.mark.parametrize("at_home", [True, False])
def test_the_command_on_a_page_finds_its_set(tmp_path, monkeypatch, at_home):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my sets").mkdir()
    (tmp_path / "my sets" / "few.py").write_text("'Few.'\n\n\ndef ablation():\n    return dict()\n")
    path = sets.find_set("vit_parts" if at_home else "my sets/few.py")
    run = dict(arm="a", seed=0, epochs=1, steps=1, processor_minutes=2.0, versions={}, threads=1, device="cpu")
    rows = [run | dict(evaluations=[dict(epoch=1, metrics=dict(AP=0.5))], command="vitkit train b")]
    page = pages.table(sets.Ablation("b", ["AP"], {"a": {}}), path, rows)
    [command] = re.findall("`(vitkit ablate .*?)`", page)
    assert sets.find_set(shlex.split(command)[2]) == path
