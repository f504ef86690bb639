"""Transforms in a user's own file, as the guide shows them, and what goes wrong with others."""

import re
from pathlib import Path

import numpy as np
import pytest

import vitkit
from vitkit.config import check_config, load_config
from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.errors import ConfigError
from vitkit.registry import ALBUMENTATIONS, TRANSFORMS

GUIDE = Path(__file__).resolve().parents[2] / "vitkit/data/transforms/README.md"
CONFIG = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["imports"] = ["my_transforms.py"]
    cfg["data"]["train"]["transforms"] = dict(type="CellTransforms", strength=0.5)
    cfg["data"]["train"]["num_images"] = cfg["data"]["val"]["num_images"] = 4
    cfg["data"] |= dict(images_per_gpu=2, num_workers=2)
    cfg["train"] = dict(epochs=1, best_metric="loss")
    return cfg
"""


@pytest.fixture
def own_transforms(tmp_path, monkeypatch):
    """Import the guide's file, whose names are registered for the test only."""
    monkeypatch.chdir(tmp_path)
    for registry in (ALBUMENTATIONS, TRANSFORMS):
        registry.load_packages()
        monkeypatch.setattr(registry, "_constructors", dict(registry._constructors))
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    Path("my_transforms.py").write_text(next(block for block in blocks if block.startswith("# my_transforms.py")))
    Path("my_config.py").write_text(CONFIG)
    return load_config("my_config.py")


def white(size=16):
    return AnnotatedImage(np.full((size, size, 3), 255, np.uint8), np.float32([[2, 2, 12, 8]]), np.array([0]))


def test_the_guides_transforms_train(own_transforms):
    run = vitkit.train("my_config.py", run_dir="run", device="cpu")
    assert run.metrics["loss"] > 0


def test_an_own_albumentation_has_arguments_and_follows_the_seed(own_transforms):
    transforms = [dict(type="OneOf", transforms=[dict(type="Stripes", step=4, p=1)], p=1)]
    pipeline = TRANSFORMS.build(dict(type="ComposedTransforms", transforms=transforms))
    images = [pipeline(white(), seed=seed).image for seed in range(12)]
    dark = {int(np.flatnonzero(image[:, 0, 0] < 255)[0]) for image in images}
    assert dark == {0, 1, 2, 3} and all((image[:, 0, 0] < 255).sum() == 4 for image in images)
    assert np.array_equal(pipeline(white(), seed=3).image, images[3])


def test_wrong_arguments_of_own_transforms_are_named(own_transforms):
    own_transforms["data"]["train"]["transforms"] = dict(type="CellTransforms", strenght=0.5)
    with pytest.raises(ConfigError, match="CellTransforms has no argument 'strenght'. Did you mean 'strength'"):
        check_config(own_transforms)
    own_transforms["data"]["train"]["transforms"] = dict(type="ComposedTransforms", transforms=[dict(type="Strypes")])
    with pytest.raises(ConfigError, match="unknown transform 'Strypes'. Did you mean 'Stripes'"):
        check_config(own_transforms)
    own_transforms["data"]["train"]["transforms"]["transforms"] = [dict(type="Stripes", steps=1)]
    with pytest.raises(ConfigError, match="Stripes: unknown argument 'steps'. Did you mean 'step'"):
        check_config(own_transforms)


@pytest.mark.parametrize("base", ["ComposedTransforms", "GridMosaic"])
def test_a_subclass_with_a_further_argument_is_checked_like_its_base(own_transforms, base):
    parent = TRANSFORMS.resolve(base)[0]

    @TRANSFORMS.register
    class Further(parent):
        def __init__(self, *, strength: float, **arguments):
            super().__init__(**arguments)
            self.strength = strength

    inner = [dict(type="HorizontalFlip")]
    inner = inner if base == "ComposedTransforms" else dict(type="ComposedTransforms", transforms=inner)
    own_transforms["data"]["train"]["transforms"] = dict(type="Further", strength=2.0, transforms=inner)
    check_config(own_transforms)
    assert TRANSFORMS.build(own_transforms["data"]["train"]["transforms"]).strength == 2.0
    own_transforms["data"]["train"]["transforms"]["transforms"] = [dict(type="HorizontalFlips")]
    with pytest.raises(ConfigError, match="HorizontalFlips"):
        check_config(own_transforms)


def test_a_registered_class_that_is_no_albumentation_is_named(own_transforms):
    ALBUMENTATIONS.register(type("Plain", (), {"__module__": __name__}))
    with pytest.raises(ConfigError, match="Plain is not an albumentation. Derive it from"):
        TRANSFORMS.build(dict(type="ComposedTransforms", transforms=[dict(type="Plain")]))
