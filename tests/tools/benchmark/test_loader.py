import time

from vitkit.tools.benchmark import loader, recipes
from vitkit.tools.benchmark.timing import Options


def test_both_pipelines_load_the_drawn_images(monkeypatch):
    monkeypatch.setattr(loader, "_ROUNDS", 1)
    rows = loader.measure("loader", Options(clock=time.process_time))
    assert [row.name for row in rows] == ["Pillow + torchvision", "vitkit"]
    assert all(row.ratio > 0 for row in rows) and rows[0].ratio == 1


def test_augmentation_and_recipes_load_the_images(monkeypatch, tmp_path):
    monkeypatch.setattr(recipes, "_RECIPES", ("deim_dfine_s_coco", "show_attend_tell"))
    for path in loader.draw_photos(tmp_path)[2:]:
        path.unlink()
    options = Options(repeats=1, images=tmp_path)
    first = recipes.measure("augmentation", options)
    assert [row.name for row in first] == [
        "torchvision, step by step", *["vitkit, step by step", "vitkit, in one warp"] * 2
    ]  # fmt: skip
    assert first[0].ratio == first[3].ratio == 1
    assert [row.name for row in recipes.measure("recipes", options)] == list(recipes._RECIPES)
