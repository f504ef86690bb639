"""A backbone learns the features of a frozen one, of any kind, which is no part of the model."""

import copy

import pytest
import torch
from torch import nn

from vitkit import build_model, load_weights
from vitkit.engine.averaging import MovingAverage
from vitkit.errors import ConfigError
from vitkit.losses.feature_distillation import FeatureDistillationLoss
from vitkit.models.pretraining import maps_and_features, pooled_features
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.registry import BACKBONES
from vitkit.structures import Batch

SPECS = {
    "resnet": dict(type="ResNet", depth=18, base_channels=8),
    "vit": dict(type="ViT", patch_size=14, d_model=16, depth=2, num_heads=2, image_size=56, num_registers=2),
    "swin": dict(type="Swin", embed_dim=4, depths=(2, 1, 1, 1), num_heads=(1, 1, 1, 1), window=4),
}


def images_of(size=64):
    return torch.randint(256, (2, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def model_of(student="resnet", teacher="vit", **options):
    torch.manual_seed(0)
    teacher = BACKBONES.build(SPECS[teacher]) if isinstance(teacher, str) else teacher
    return build_model(dict(type="FeatureDistillation", backbone=SPECS[student], teacher=teacher, **options))


@pytest.mark.parametrize("maps", ["nearest", "all"])
@pytest.mark.parametrize("teacher", SPECS)
@pytest.mark.parametrize("student", SPECS)
def test_every_kind_learns_from_every_kind(student, teacher, maps):
    model = model_of(student, teacher, maps=maps)
    outputs = model(images_of())
    assert len(outputs["pred_maps"]) == (len(model.backbone.feature_info) if maps == "all" else 1)
    for predicted in outputs["pred_maps"].values():
        assert predicted.shape == outputs["teacher_map"].shape
    assert outputs["pred_features"].shape == outputs["teacher_features"].shape == outputs["teacher_map"].shape[:2]
    assert not outputs["teacher_map"].requires_grad and not outputs["teacher_features"].requires_grad
    sum(FeatureDistillationLoss()(outputs, [{}] * 2).values()).backward()
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or parameter.grad.isfinite().all(), name
    features = model.eval()(images_of())["features"]
    assert features.shape == (2, list(model.backbone.feature_info.values())[-1].channels)


@pytest.mark.parametrize("kind", SPECS)
def test_a_student_that_equals_its_teacher_has_no_loss(kind):
    """With projections that change nothing: maps, norms, tokens and pooled features are the same on both sides."""
    teacher = BACKBONES.build(SPECS[kind])
    model = model_of(kind, copy.deepcopy(teacher))
    model.backbone.load_state_dict(teacher.state_dict())
    model.backbone.eval()
    for projection in (*model.map_projections.values(), model.image_projection):
        nn.init.eye_(projection.weight.data.flatten(1))
        nn.init.zeros_(projection.bias)
    losses = FeatureDistillationLoss()(model(images_of(56 if kind == "vit" else 64)), [{}] * 2)
    assert losses["location"].item() == pytest.approx(0, abs=1e-5)
    assert losses["image"].item() == pytest.approx(0, abs=1e-5)


def test_maps_and_pooled_features_come_from_one_pass():
    for spec in SPECS.values():
        backbone = BACKBONES.build(spec).eval()
        images = torch.rand(2, 3, 64, 64)
        maps, features = maps_and_features(backbone, images)
        torch.testing.assert_close(features, pooled_features(backbone, images))
        for name, expected in backbone(images).items():
            torch.testing.assert_close(maps[name], expected)


@pytest.mark.parametrize(("size", "expected"), [(56, 56), (60, 56), (64, 70), (20, 14), (14, 14)])
def test_images_are_resized_to_the_nearest_multiple_of_the_teachers_patches(size, expected):
    model, seen = model_of("vit", "vit"), []
    model.frozen_teacher.network.patch_embed.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    model(images_of(size))
    assert seen == [(2, 3, expected, expected)]


def test_each_network_sees_pixels_by_its_own_statistics():
    teacher = BACKBONES.build(dict(SPECS["resnet"], pixel_mean=[0.5] * 3, pixel_std=[0.25] * 3))
    model, seen = model_of("resnet", teacher), []
    for network in (model.backbone, teacher):
        network.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    images = images_of()
    model(images)
    imagenet = ((images / 255).movedim(1, -1) - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)
    assert len(seen) == 2
    for expected in ((images / 255 - 0.5) / 0.25, imagenet.movedim(-1, 1)):
        assert any(torch.allclose(x, expected, atol=1e-5) for x in seen)


def test_the_teacher_is_no_part_of_the_model_and_never_changes():
    model = model_of("resnet", "resnet")
    network = model.frozen_teacher.network
    before = copy.deepcopy(network.state_dict())
    teachers = {id(x) for x in (*network.parameters(), *network.buffers())}
    assert not teachers & {id(x) for x in (*model.parameters(), *model.buffers())}
    assert len(model.state_dict()) == len(model.backbone.state_dict()) + 5
    assert MovingAverage(model, decay=0.9).module.frozen_teacher.network is network

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    assert not network.training and not any(x.requires_grad for x in network.parameters())
    sum(FeatureDistillationLoss()(model(images_of()), [{}] * 2).values()).backward()
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())

    model.to(torch.float64)
    assert {x.dtype for x in network.parameters()} == {torch.float64}  # it goes where the model goes


def test_the_teachers_channels_are_centered_and_scaled_and_constant_ones_do_not_count():
    model = model_of("resnet", "resnet")
    last = model.frozen_teacher.network.layer4[-1]
    last.register_forward_hook(lambda module, args, x: x.index_fill(1, torch.tensor([0]), 3.0))
    batches = [Batch({"images": images_of()}, [{}] * 2), Batch({"images": images_of().flip(2)}, [{}] * 2)]
    raw = torch.cat([model.teach(batch.inputs["images"]) for batch in batches])
    model.measure_teacher(iter(batches))
    outputs = [model(**batch.inputs) for batch in batches]
    for name, x in (("teacher_map", raw[:, :, 1:]), ("teacher_features", raw[:, :, :1])):
        got = torch.cat(
            [output[name].flatten(2) if name == "teacher_map" else output[name][..., None] for output in outputs]
        )
        expected = (x - x.mean((0, 2), keepdim=True)) / x.std((0, 2), correction=0, keepdim=True)
        torch.testing.assert_close(got[:, 1:], expected[:, 1:].nan_to_num(), rtol=1e-4, atol=1e-4)  # some are 0 anyway
        assert not got[:, 0].any() and got.any()
    average = MovingAverage(model, decay=0.9)
    for _ in range(3):
        average.update_parameters(model)
    assert torch.equal(average.module.teacher_statistics, model.teacher_statistics)

    plain = model_of("resnet", "resnet", standardize=False)
    plain.measure_teacher(iter(batches))
    torch.testing.assert_close(plain(images_of())["teacher_map"].flatten(2), plain.teach(images_of())[:, :, 1:])


def test_a_trained_model_needs_no_teacher():
    trained = model_of("resnet", "vit").eval()
    model = build_model(dict(type="FeatureDistillation", backbone=SPECS["resnet"], teacher="runs/gone")).eval()
    load_weights(model, trained.state_dict())
    torch.testing.assert_close(model(images_of())["features"], trained(images_of())["features"])
    with pytest.raises(ConfigError, match="FeatureDistillation has no teacher, which its training needs"):
        model.train()(images_of())


def test_what_a_teacher_cannot_be_is_named():
    with pytest.raises(ConfigError, match="maps='some': expected 'nearest' or 'all'"):
        model_of(maps="some")
    with pytest.raises(ConfigError, match="the teacher's images have 1 channels, the student's 3"):
        model_of("resnet", BACKBONES.build(dict(SPECS["vit"], in_channels=1, pixel_mean=[0.5], pixel_std=[0.5])))
    with pytest.raises(ConfigError, match="the teacher is a classifier; expected a backbone of maps"):
        model_of("resnet", BACKBONES.build(dict(SPECS["vit"], num_classes=3)))
