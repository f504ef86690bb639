"""The matrix of backbone families and heads, in tiny settings, at odd image sizes."""

import pytest
import timm
import torch
from helpers.backbones_and_heads import BACKBONES, HEADS

from vitkit.engine.build import build_model
from vitkit.errors import ConfigError
from vitkit.registry import CRITERIA

ONE_MAP = {"vit", "vit_windows", "dinov2", "dinov3"}

CRITERIA_OF = {
    "detr": dict(
        type="SetCriterion",
        weights=dict(labels=1.0, l1=5.0, giou=2.0),
        no_object_weight=0.1,
        matcher=dict(type="HungarianMatcher", cost_labels=1.0, cost_l1=5.0, cost_giou=2.0),
    ),
    "deformable_detr": dict(
        type="SetCriterion",
        class_loss="focal",
        weights=dict(labels=1.0, l1=5.0, giou=2.0),
        matcher=dict(type="HungarianMatcher", activation="sigmoid", cost_labels=1.0, cost_l1=5.0, cost_giou=2.0),
    ),
    "maskformer": dict(
        type="MaskCriterion",
        mask_loss="focal",
        weights=dict(labels=1.0, mask=20.0, dice=1.0),
        no_object_weight=0.1,
        matcher=dict(type="HungarianMaskMatcher", mask_cost="focal", cost_labels=1.0, cost_mask=20.0, cost_dice=1.0),
    ),
    "mask2former": dict(
        type="MaskCriterion",
        weights=dict(labels=2.0, mask=5.0, dice=5.0),
        no_object_weight=0.1,
        num_points=64,
        matcher=dict(type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0, num_points=64),
    ),
}


def build(backbone, head):
    spec = HEADS[head]
    if backbone in ONE_MAP and head in ("maskformer", "mask2former", "deformable_detr"):
        spec = {**spec, "neck": dict(type="SimpleFeaturePyramid", out_channels=32, neck=spec["neck"])}
    return build_model(dict(spec, backbone=BACKBONES[backbone], num_queries=5, num_classes=3))


def batch():
    torch.manual_seed(0)
    mask = torch.zeros(2, 69, 91, dtype=torch.bool)
    mask[1, 50:] = mask[1, :, 77:] = True
    images = torch.randint(0, 256, (2, 3, 69, 91), dtype=torch.uint8) * ~mask[:, None]
    targets = [
        dict(
            labels=torch.tensor([0, 2]),
            boxes_cxcywh=torch.tensor([[0.3, 0.3, 0.2, 0.4], [0.6, 0.5, 0.4, 0.3]]),
            masks=torch.rand(2, 69, 91) > 0.5,
        ),
        dict(
            labels=torch.zeros(0, dtype=torch.int64),
            boxes_cxcywh=torch.zeros(0, 4),
            masks=torch.zeros(0, 50, 77, dtype=torch.bool),
        ),
    ]
    return images, mask, targets


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_pair_trains_at_odd_sizes(backbone, head):
    if backbone == "dinov3" and not timm.is_model("vit_small_patch16_dinov3"):
        pytest.skip(f"timm {timm.__version__} has no DINOv3")
    torch.manual_seed(0)
    model = build(backbone, head).train()
    images, mask, targets = batch()
    outputs = model(images, mask)
    losses = CRITERIA.build(CRITERIA_OF[head])(outputs, targets)
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values())
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without, "DDP does not forgive parameters without a gradient"
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    results = model.postprocess(outputs, [(69, 91), (100, 154)])
    assert len(results) == 2 and all(torch.isfinite(result["scores"]).all() for result in results)


def test_multi_level_heads_name_the_remedy_for_a_single_map():
    spec = dict(HEADS["mask2former"], backbone=BACKBONES["vit"], num_queries=5, num_classes=3)
    with pytest.raises(ConfigError, match=r"the backbone returns 1 \(res4\).*SimpleFeaturePyramid"):
        build_model(spec)
