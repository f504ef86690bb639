"""Clips of the synthetic world whose class is the direction of motion."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from vitkit.data.loading.splits import build_dataset
from vitkit.data.synthetic.world import World
from vitkit.errors import ConfigError

WORLD = World(image_size=32, max_objects=1, min_size=0.2, max_size=0.4)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("index", range(4))
def test_opposite_directions_have_the_same_frames_in_reverse(axis, index):
    direction = np.eye(2, dtype=int)[axis]
    forward, backward = (WORLD.slide(index, 5, tuple(sign * direction)) for sign in (1, -1))
    assert all((a == b).all() for a, b in zip(forward, backward[::-1], strict=True))
    assert not any((a == b).all() for a, b in pairwise(forward))


def test_shape_moves_in_the_direction_of_its_class():
    plain = dict(type="ShapesMotion", num_videos=8, directions=["left", "right", "up", "down"])
    dataset = build_dataset(plain)
    assert dataset.classes == ["left", "right", "up", "down"]
    for index in range(8):
        clip = dataset[index]["image"].float()
        # The ground does not move; pixels that differ from the mean frame belong to moving things.
        moving = (clip - clip.mean(dim=1, keepdim=True)).abs().sum(dim=0)[[0, -1]]
        moving = (moving * (moving > moving.amax() / 2)).flatten(1)
        places = torch.cartesian_prod(torch.arange(32.0), torch.arange(32.0))
        (y0, x0), (y1, x1) = (moving @ places) / moving.sum(1, keepdim=True)
        step = {"left": x0 - x1, "right": x1 - x0, "up": y0 - y1, "down": y1 - y0}
        assert max(step, key=step.get) == dataset.classes[dataset[index]["target"]["label"]]


def test_clip_depends_only_on_its_index():
    spec = dict(type="ShapesMotion", num_videos=4, num_frames=3)
    assert (build_dataset(spec)[2]["image"] == build_dataset(spec)[2, 5]["image"]).all()
    assert not (build_dataset(spec)[2]["image"] == build_dataset(spec | {"split": "val"})[2]["image"]).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(directions=["lift"]), "unknown 'lift'. Did you mean 'left'"),
        (dict(num_videos=0), "num_videos: got 0"),
        (dict(min_objects=0), "min_objects: got 0"),
    ],
)
def test_invalid_settings_are_errors(wrong, message):
    with pytest.raises(ConfigError, match=message):
        build_dataset(dict(type="ShapesMotion", **{"num_videos": 4} | wrong))
