"""Student and teacher of self-distillation, their loss, and what is rejected."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers.weights import assert_same_weights
from timm.layers import DropPath
from torch import nn
from torchvision.ops import StochasticDepth

from vitkit import build_model, load_weights
from vitkit.errors import CheckpointError, ConfigError
from vitkit.models.pretraining import pooled_features
from vitkit.models.self_distillation import SelfDistillationLoss, SelfDistillationSchedules, remove_drop_path
from vitkit.registry import BACKBONES
from vitkit.weights import load_pretrained

VIT = dict(
    type="ViT", patch_size=8, d_model=32, depth=2, num_heads=2, image_size=32, drop_path=0.5, position_offset=0.1
)
RESNET = dict(type="ResNet", depth=18, base_channels=4, pretrained=False, drop_path=0.5)
HEAD = dict(num_prototypes=20, hidden_channels=24, bottleneck_channels=8)
B = 3


def make_model(backbone=VIT, **changes):
    torch.manual_seed(0)
    return build_model(dict(type="SelfDistillation", backbone=backbone, **HEAD, **changes))


def views(batch_size=B, num_small=2):
    generator = torch.Generator().manual_seed(1)
    sizes = dict(images=(2 * batch_size, 3, 32, 32), small_images=(num_small * batch_size, 3, 16, 16))
    return {name: torch.randint(256, size, dtype=torch.uint8, generator=generator) for name, size in sizes.items()}


def make_loss(**arguments):
    criterion = SelfDistillationLoss(**arguments)
    criterion.teacher_temperature = 0.04
    return criterion


@pytest.mark.parametrize("backbone", [VIT, RESNET], ids=["vit", "resnet"])
def test_only_the_student_is_trained_and_skips_blocks(backbone):
    model = make_model(backbone, norm_last_layer=False, batch_norm=backbone is RESNET)
    outputs = model(**views())
    assert outputs["student_logits"].shape == (4 * B, 20) and outputs["teacher_logits"].shape == (2 * B, 20)
    assert not outputs["teacher_logits"].requires_grad and not outputs["teacher_features"].requires_grad
    make_loss()(outputs, [{}] * B)["distillation"].backward()
    for name, parameter in model.named_parameters():
        if name.startswith("student."):
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        else:
            assert parameter.grad is None and not parameter.requires_grad, name
    rates = [
        [m.p for m in part.modules() if isinstance(m, StochasticDepth)] for part in (model.student, model.backbone)
    ]
    assert max(rates[0]) == 0.5 and set(rates[1]) == {0.0}


def test_teacher_starts_as_the_student_and_its_batch_norms_use_the_batch():
    model = make_model(dict(RESNET, drop_path=0.0))
    outputs = model(images=views()["images"])
    torch.testing.assert_close(outputs["student_logits"], outputs["teacher_logits"])
    assert model.backbone.bn1.training and model.backbone.bn1.num_batches_tracked == 1
    model.eval()
    images = views()["images"]
    assert torch.equal(model(images)["features"], pooled_features(model.backbone, model.prepare(images)))


def test_moving_the_teacher_changes_parameters_and_not_buffers():
    model = make_model(RESNET)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for part in (model.student["backbone"], model.student["head"]):
        for value in part.state_dict().values():
            value.add_(1)
    model.update_teacher(0.75)
    for name, value in model.state_dict().items():
        if not name.startswith(("student.", "center")):
            is_parameter = name in dict(model.named_parameters())
            torch.testing.assert_close(value, before[name] + 0.25 if is_parameter else before[name], msg=name)


def test_each_view_of_the_student_is_compared_with_the_other_views_of_the_teacher():
    torch.manual_seed(0)
    outputs = dict(
        student_logits=torch.randn(4 * B, 20), teacher_logits=torch.randn(2 * B, 20), center=torch.randn(1, 20),
        teacher_features=torch.randn(2 * B, 32),
    )  # fmt: skip
    loss = make_loss()(outputs, [{}] * B)["distillation"]
    total, count = 0.0, 0
    for t in range(2):
        for s in range(4):
            for i in range(B):
                if s != t:
                    q = ((outputs["teacher_logits"][t * B + i] - outputs["center"][0]) / 0.04).softmax(0)
                    p = (outputs["student_logits"][s * B + i] / 0.1).softmax(0)
                    total, count = total - float(q @ p.log()), count + 1
    assert count == 6 * B and float(loss) == pytest.approx(total / count, rel=1e-5)


def test_center_follows_the_batches_of_taken_steps_only():
    criterion, model = make_loss(), make_model()
    center = model.center.fill_(1)
    logits = [torch.full((2 * B, 20), float(value)) for value in (3, 5)]
    outputs = [
        dict(student_logits=torch.zeros(2 * B, 20), teacher_logits=x, teacher_features=torch.randn(6, 4), center=center)
        for x in logits
    ]
    for batch in outputs:
        criterion(batch, [{}] * B)
    assert torch.equal(center, torch.ones(1, 20))  # not before the step
    model.update_center(criterion.batch_means, 0.9)
    torch.testing.assert_close(model.center, torch.full((1, 20), 0.9 + 0.1 * 4))
    skipped = SimpleNamespace(decision=SimpleNamespace(take=False))
    SelfDistillationSchedules().after_step(SimpleNamespace(model=model, criterion=criterion), skipped)
    assert not criterion.batch_means  # those of a skipped step do not count in the next one
    torch.testing.assert_close(model.center, torch.full((1, 20), 0.9 + 0.1 * 4))


def test_meters_tell_uniform_equal_and_varied_outputs():
    def measured(teacher_logits, features):
        criterion = make_loss()
        zeros = torch.zeros(2 * B, 20)
        criterion(
            dict(student_logits=zeros, teacher_logits=teacher_logits, teacher_features=features, center=zeros[:1]),
            [{}] * B,
        )
        return {name: meter.compute()[0] for name, meter in criterion.meters.items()}

    uniform = measured(torch.zeros(2 * B, 20), torch.ones(2 * B, 32))
    assert uniform["teacher_entropy"] == pytest.approx(math.log(20)) and uniform["feature_spread"] == 0
    same = measured(torch.eye(20)[[4] * 6], torch.eye(6, 32))
    assert same["teacher_entropy"] < 0.01 and same["mean_entropy"] < 0.01 and same["feature_spread"] > 0.4
    varied = measured(torch.eye(20)[:6], torch.randn(2 * B, 4096, generator=torch.Generator().manual_seed(0)))
    assert varied["teacher_entropy"] < 0.01 and varied["mean_entropy"] == pytest.approx(math.log(6), rel=0.01)
    assert varied["feature_spread"] == pytest.approx(1, abs=0.1)


def test_student_and_teacher_start_from_the_backbone_of_another_models_checkpoint(tmp_path):
    other = build_model(dict(type="MAE", backbone=dict(VIT, image_size=64), decoder_d_model=16))
    torch.save(other.state_dict(), tmp_path / "mae.pth")
    model = make_model()
    load_weights(model, tmp_path / "mae.pth", partial=True)
    assert model.backbone.cls_token.equal(other.backbone.cls_token)
    assert_same_weights(model.student["backbone"], model.backbone)


def test_pretrained_weights_are_those_of_student_and_teacher(tmp_path):
    trained = BACKBONES.build({**VIT, "drop_path": 0.0})
    torch.save(trained.state_dict(), tmp_path / "vit.pth")
    model = make_model(dict(VIT, pretrained=str(tmp_path / "vit.pth")))
    load_pretrained(model)
    for part in (model.backbone, model.student["backbone"]):
        assert_same_weights(trained, part)


def test_a_resnets_teacher_in_an_official_checkpoint_is_loaded_as_a_backbone():
    model = make_model(RESNET)
    teacher = {f"module.backbone.{name}": x for name, x in model.backbone.state_dict().items()}
    teacher |= {f"module.head.{name}": x for name, x in model.head.state_dict().items()}
    backbone = BACKBONES.build(RESNET)
    load_weights(backbone, dict(student={}, teacher=teacher, epoch=3))
    assert torch.equal(backbone.conv1.weight, model.backbone.conv1.weight)


def test_weights_of_other_sizes_are_rejected():
    other = build_model(dict(type="SelfDistillation", backbone=VIT, **HEAD | dict(num_prototypes=30)))
    with pytest.raises(CheckpointError, match="head.last_layer.weight_g: checkpoint"):
        load_weights(make_model(), other.state_dict())


def test_every_kind_of_stochastic_depth_is_removed():
    block = nn.Sequential(DropPath(0.3), StochasticDepth(0.3, "row"))
    remove_drop_path(block)
    x = torch.ones(64, 2)
    assert torch.equal(block.train()(x), x)


@pytest.mark.parametrize(
    ("inputs", "count", "message"),
    [
        (
            dict(views(), images=views()["images"][:B]),
            B,
            r"got 3 large and 6 small views of 3 images; expected two large",
        ),
        (
            views(num_small=1),
            B - 1,
            r"got 6 large and 3 small views of 2 images; .*transforms=dict\(type='MultiCrop'\)",
        ),
    ],
)
def test_batches_without_two_large_views_are_rejected(inputs, count, message):
    with pytest.raises(ConfigError, match=message):
        make_loss()(make_model()(**inputs), [{}] * count)


def test_wrong_arguments_are_rejected():
    with pytest.raises(ConfigError, match="num_prototypes=1: expected at least 2"):
        build_model(dict(type="SelfDistillation", backbone=VIT, num_prototypes=1))
    with pytest.raises(ConfigError, match="student_temperature=0: expected above 0"):
        SelfDistillationLoss(student_temperature=0)
    with pytest.raises(ConfigError, match="center_momentum=2: expected 0 to 1"):
        SelfDistillationLoss(center_momentum=2)
    with pytest.raises(ConfigError, match="position_offset=1: expected at least 0 and below 1"):
        BACKBONES.build(dict(VIT, position_offset=1))
    with pytest.raises(ConfigError, match=r"nothing moves the teacher. Add dict\(type='SelfDistillationSchedules'\)"):
        SelfDistillationLoss()(make_model()(**views()), [{}] * B)
    with pytest.raises(ConfigError, match="returns no 'student_logits'. It is for model.type=SelfDistillation"):
        make_loss()({"logits": torch.zeros(1)}, [{}])
