"""Boxes under flips, resizing, crops and removal beside torchvision's second version of transforms.

Zoom-out, IoU crop, distortion of colors and mosaics on the same random draws are in tests/data, as they need no package
that vitkit does not have."""

import numpy as np
import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.data.transforms.pipelines import ComposedTransforms, EvalResize
from vitkit.ops.boxes import cxcywh_to_xyxy, xyxy_to_cxcywh

pytestmark = pytest.mark.peers


def sample(seed):
    """Return an image with boxes of all sizes in it, some on its borders and some of a pixel; and torchvision's."""
    rng = np.random.default_rng(seed)
    height, width = (int(v) for v in rng.integers(40, 150, 2))
    corners = np.sort(rng.uniform(0, 1, (25, 2, 2)), axis=1).reshape(25, 4) * np.array([width, height] * 2)
    corners[:4] = [[0, 0, width, height], [0, 0, 1, 1], [width - 1, 0, width, height], [5, 5, 6.5, 30]]
    boxes = corners.astype(np.float32)
    image = rng.integers(0, 256, (height, width, 3), np.uint8)
    labels = np.arange(25)
    theirs = {
        "image": tv_tensors.Image(torch.from_numpy(image).permute(2, 0, 1)),
        "boxes": tv_tensors.BoundingBoxes(torch.from_numpy(boxes), format="XYXY", canvas_size=(height, width)),
        "labels": torch.from_numpy(labels),
    }
    return AnnotatedImage(image, boxes, labels), theirs


def assert_equal(ours, theirs):
    assert ours.image.shape[:2] == tuple(theirs["image"].shape[-2:])
    assert ours.labels.tolist() == theirs["labels"].tolist()
    np.testing.assert_allclose(ours.boxes_xyxy, theirs["boxes"].numpy(), atol=2e-3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["HorizontalFlip", "VerticalFlip"])
def test_flips(name, seed):
    ours, theirs = sample(seed)
    flipped = ComposedTransforms(transforms=[dict(type=name, p=1.0)], min_visible=0.0, min_box_side=0.0)(ours, seed=0)
    theirs = getattr(v2, f"Random{name}")(p=1.0)(theirs)
    assert_equal(flipped, theirs)
    assert np.array_equal(flipped.image, theirs["image"].permute(1, 2, 0).numpy())


@pytest.mark.parametrize("seed", range(4))
def test_resizing(seed):
    ours, theirs = sample(seed)
    assert_equal(EvalResize(size=[64, 96])(ours), v2.Resize([64, 96])(theirs))


@pytest.mark.parametrize("seed", range(8))
def test_crops_cut_boxes_and_remove_small_ones(seed):
    """torchvision keeps boxes whose sides are at least as long as the limit, and so does vitkit."""
    ours, theirs = sample(seed)
    rng = np.random.default_rng(seed)
    height, width = ours.image.shape[:2]
    x0, y0 = int(rng.integers(0, width // 2)), int(rng.integers(0, height // 2))
    x1, y1 = int(rng.integers(x0 + 15, width + 1)), int(rng.integers(y0 + 15, height + 1))
    crop = dict(type="Crop", x_min=x0, y_min=y0, x_max=x1, y_max=y1)
    cropped = ComposedTransforms(transforms=[crop], min_visible=0.0, min_box_side=4.0)(ours, seed=0)
    theirs = {name: tvf.crop(theirs[name], y0, x0, y1 - y0, x1 - x0) for name in ("image", "boxes")} | {
        "labels": theirs["labels"]
    }
    assert_equal(cropped, v2.SanitizeBoundingBoxes(min_size=4)(v2.ClampBoundingBoxes()(theirs)))


@pytest.mark.parametrize("seed", range(2))
def test_conversions_of_boxes(seed):
    _, theirs = sample(seed)
    centers = tvf.convert_bounding_box_format(theirs["boxes"], new_format="CXCYWH")
    boxes = theirs["boxes"].as_subclass(torch.Tensor)
    torch.testing.assert_close(xyxy_to_cxcywh(boxes), centers.as_subclass(torch.Tensor))
    torch.testing.assert_close(cxcywh_to_xyxy(centers.as_subclass(torch.Tensor)), boxes)
