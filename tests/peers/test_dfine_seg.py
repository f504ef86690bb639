"""D-FINE-seg beside its own package (https://github.com/ArgoHA/D-FINE-seg, dfine-seg 0.6.2): all sizes, both tasks."""

import pytest
import torch
import torch.nn.functional as F
from helpers.random_weights import randomize

from vitkit.configs.dfine_seg import VARIANTS, dfine_seg_model
from vitkit.configs.dfine_sem import dfine_sem_model
from vitkit.engine.build import build_model
from vitkit.model_zoo.converters.dfine import OFFICIAL
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.ops.masks import mask_logits

pytestmark = pytest.mark.peers
peer = pytest.importorskip("dfine_seg.model.dfine")
SIZES = [arguments["size"] for arguments, _ in VARIANTS.values()]
SIDES = (256, 320)
COMPUTED = ("anchors", "valid_mask", "num_points_scale", "project")
"""By the original, for its size of images."""


def pair_of(spec, size, num_classes, **task):
    """Return our model with random weights, and theirs with the same, both in float64."""
    model = build_model(dict(spec, num_classes=num_classes, backbone=spec["backbone"] | dict(pretrained=False)))
    randomize(model)
    theirs = peer.build_model(size, num_classes, not task, "cpu", img_size=SIDES, **task)
    form = next(form for form in OFFICIAL if all(name in model.state_dict() for name in form.ours))
    written, own = form.table.write(model.state_dict(), model), theirs.state_dict()
    computed = {name: value for name, value in own.items() if name.split(".")[-1] in COMPUTED}
    theirs.load_state_dict({name: written[name] for name in own.keys() - computed.keys()} | computed)
    return model.double().eval(), theirs.double().eval()


def normalize(images):
    """Return images in 0..1 as our models read float ones."""
    mean, std = (torch.tensor(values, dtype=images.dtype).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (images - mean) / std


@pytest.mark.parametrize("size", SIZES)
def test_instances_are_the_same(size):
    model, theirs = pair_of(dfine_seg_model(size), size, num_classes=7)
    images = torch.rand(1, 3, *SIDES, dtype=torch.float64)
    with torch.no_grad():
        outputs, expected = model(normalize(images)), theirs(images)
    for field in ("pred_logits", "pred_boxes"):
        torch.testing.assert_close(outputs[field].double(), expected[field].double(), atol=1e-3, rtol=1e-4)
    masks = mask_logits(outputs["mask_embed"], outputs["mask_features"]).sigmoid()
    assert masks.shape == (1, 300, SIDES[0] // 4, SIDES[1] // 4)
    torch.testing.assert_close(masks.double(), expected["pred_masks"].double(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("size", SIZES)
def test_semantic_maps_are_the_same(size):
    model, theirs = pair_of(dfine_sem_model(size), size, num_classes=7, task="sem_seg")
    images = torch.rand(1, 3, *SIDES, dtype=torch.float64)
    with torch.no_grad():
        logits, expected = model(normalize(images))["pred_semantic"], theirs(images)["sem_seg_logits"]
    logits = F.interpolate(logits, scale_factor=4, mode="bilinear", align_corners=False)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
