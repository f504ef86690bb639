"""The base of models that train a backbone without labels."""

import pytest
import torch

from vitkit.errors import ConfigError
from vitkit.models.pretraining import PretrainingModel, pooled_features
from vitkit.ops.images import normalize_images
from vitkit.registry import BACKBONES

VIT = dict(type="ViT", patch_size=8, d_model=32, depth=2, num_heads=2, image_size=32)
RESNET = dict(type="ResNet", depth=18, base_channels=8, pretrained=False)


def test_features_of_a_vit_are_its_class_token_after_the_norm():
    torch.manual_seed(0)
    model = PretrainingModel(dict(VIT, num_registers=2)).eval()
    images = torch.randint(0, 256, (2, 3, 32, 24), dtype=torch.uint8)
    backbone = model.trained_backbone
    tokens = backbone.run_blocks(backbone.tokens(normalize_images(images))).x
    assert torch.equal(model(images)["features"], backbone.norm(tokens)[:, 0])
    assert model(images)["features"].shape == (2, 32)


@pytest.mark.parametrize("spec", [RESNET, dict(VIT, class_token=False)], ids=["resnet", "vit without class token"])
def test_features_of_other_backbones_are_the_mean_of_the_coarsest_map(spec):
    torch.manual_seed(0)
    backbone = BACKBONES.build(spec).eval()
    images = torch.randn(2, 3, 64, 96)
    coarsest = list(backbone(images).values())[-1]
    assert torch.equal(pooled_features(backbone, images), coarsest.flatten(2).mean(2))


def test_pixels_are_normalized_by_the_backbones_statistics():
    spec = dict(VIT, pixel_mean=(0.5, 0.5, 0.5), pixel_std=(0.5, 0.5, 0.5))
    model = PretrainingModel(spec)
    assert torch.equal(model.prepare(torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)), torch.ones(1, 3, 8, 8))


def test_a_classifier_is_rejected():
    with pytest.raises(ConfigError, match=r"backbone ViT is a classifier; .* Leave backbone.num_classes out"):
        PretrainingModel(dict(VIT, num_classes=5))
