"""The base of models that train a backbone without labels."""

import pytest
import torch
import torch.distributed as dist
from helpers.processes import on_ranks
from helpers.sharded_training import needs_newer_torch

from vitkit.engine.parallel import shard, state_of
from vitkit.errors import ConfigError
from vitkit.losses.feature_distillation import FeatureDistillationLoss
from vitkit.models.feature_distillation import FeatureDistillation
from vitkit.models.mae import MAE, ReconstructionLoss
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


def two_steps(build, criterion, ranks: int = 1) -> dict:
    """Train a model on four images, of which each rank has its share, sharded among them."""
    torch.manual_seed(0)
    model, rank = build(), dist.get_rank() if ranks > 1 else 0
    images, noise = torch.randn(4, 3, 32, 32), torch.rand(4, 16)
    if ranks > 1:
        model = shard(model, torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    share = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    for _ in range(2):
        given = {"noise": noise[share]} if isinstance(model, MAE) else {}
        sum(criterion(model(images[share], **given), [{}] * (4 // ranks)).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(state_of(model, model))


def build_mae():
    return MAE(dict(VIT, positions="sincos"), decoder_d_model=8, decoder_depth=1, decoder_num_heads=2)


def build_distillation():
    return FeatureDistillation(VIT, BACKBONES.build(dict(VIT, d_model=32)))


MODELS_TO_SHARD = {"mae": (build_mae, ReconstructionLoss()), "distil": (build_distillation, FeatureDistillationLoss())}


def sharded_steps(folder) -> dict:
    return {name: two_steps(*parts, ranks=2) for name, parts in MODELS_TO_SHARD.items()}


@pytest.mark.slow
@needs_newer_torch
def test_sharded_models_train_as_whole_ones(tmp_path):
    on_main, _ = on_ranks(2, tmp_path, sharded_steps)
    for name, parts in MODELS_TO_SHARD.items():
        whole = two_steps(*parts)
        assert on_main[name].keys() == whole.keys()
        for key, value in whole.items():
            torch.testing.assert_close(on_main[name][key], value, rtol=1e-4, atol=1e-6)
