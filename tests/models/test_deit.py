"""A classifier learns from the logits of a frozen one, by a distillation token if it has one."""

import pytest
import torch

import vitkit
from vitkit.data.transforms.mixing import BatchMixing
from vitkit.engine import teaching
from vitkit.errors import CheckpointError, ConfigError
from vitkit.losses.classification import ClassificationLoss
from vitkit.models.classifier import Classifier
from vitkit.models.deit import DistilledClassifier
from vitkit.ops.images import normalize_images
from vitkit.structures import Batch

DEIT = dict(type="ViT", patch_size=16, d_model=16, depth=2, num_heads=2, image_size=32, distilled=True)
RESNET = dict(type="ResNet", depth=18, base_channels=8, pretrained=False)


def images_of(count=4):
    return torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def model_of(backbone=DEIT, **teacher):
    torch.manual_seed(0)
    return DistilledClassifier(backbone, Classifier(RESNET, num_classes=5, **teacher), num_classes=5)


def test_each_token_has_its_logits_in_training_and_their_mean_predicts():
    model, images = model_of(), images_of()
    outputs = model(images)
    assert {name: x.shape for name, x in outputs.items()} == dict.fromkeys(
        ("logits", "distillation_logits", "teacher_logits"), (4, 5)
    )
    mean = (outputs["logits"] + outputs["distillation_logits"]) / 2
    predicted = model.eval()(images)
    assert predicted.keys() == {"logits"}
    torch.testing.assert_close(predicted["logits"], mean)
    torch.testing.assert_close(predicted["logits"], Classifier(model.backbone, num_classes=5)(images)["logits"])


@pytest.mark.parametrize("backbone", [DEIT, RESNET])
def test_everything_but_the_teacher_learns(backbone):
    model = model_of(backbone)
    teacher = model.frozen_teacher.network
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    model.train()
    outputs = model(images_of())
    assert (outputs["logits"] is outputs["distillation_logits"]) == (backbone is RESNET)
    losses = ClassificationLoss(distillation=dict(kind="soft"))(outputs, [{"label": 1}] * 4)
    sum(losses.values()).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert not {id(x) for x in teacher.parameters()} & {id(x) for x in model.parameters()}
    assert all(name.startswith("backbone.") for name in model.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_the_teacher_labels_the_mixed_image_by_its_own_pixel_statistics():
    model, seen = model_of(pixel_mean=[0.5] * 3, pixel_std=[0.25] * 3), []
    for network in (model.backbone.patch_embed, model.frozen_teacher.network.backbone):
        network.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    mixed = BatchMixing(5, mixup=0.8)(Batch({"images": images_of()}, [{"label": i} for i in range(4)]))
    assert "class_weights" in mixed.targets[0]
    outputs = model(**mixed.inputs)
    expected = normalize_images(mixed.inputs["images"], mean=[0.5] * 3, std=[0.25] * 3)
    torch.testing.assert_close(seen[0], mixed.inputs["images"])
    torch.testing.assert_close(seen[1], expected)
    with torch.no_grad():  # in evaluation mode, whatever the student's
        torch.testing.assert_close(outputs["teacher_logits"], model.frozen_teacher.network.backbone(expected))


def test_a_run_teaches_students_of_the_same_classes_which_then_do_without_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {
        "data.train.num_images": 16, "data.val.num_images": 8, "data.images_per_gpu": 8, "data.val_images_per_gpu": 8,
        "train.epochs": 1, "train.reference_batch_size": 8,
    }  # fmt: skip
    vitkit.train("quickstart/classifier", run_dir="large", device="cpu", **small, **{"model.backbone": RESNET})
    taught = {
        "model": dict(type="DistilledClassifier", teacher="large", backbone=DEIT),
        "criterion.distillation": dict(kind="hard"),
        "data.repeated_augmentation": 2,
    }
    vitkit.train("quickstart/classifier", run_dir="small", device="cpu", **small, **taught)
    (tmp_path / "large" / "best.pth").rename("best.pth")
    (tmp_path / "large" / "last.pth").unlink()
    student = vitkit.load("small")
    assert isinstance(student.model, DistilledClassifier) and student.model.frozen_teacher is None
    assert len(student.predict(images_of(1)[0].movedim(0, 2).numpy())) == 1
    with pytest.raises(ConfigError, match=r"^model\.teacher: 'large' is not|^model\.teacher: 'large' is neither"):
        vitkit.train(resume="small", device="cpu", **{"train.epochs": 2})

    other = DistilledClassifier(DEIT, str(tmp_path / "best.pth"), num_classes=6)
    with pytest.raises(CheckpointError, match=r"^model\.teacher: .*its class head is for other classes"):
        teaching.add_teacher(other, [f"class {i}" for i in range(6)])
    with pytest.raises(ConfigError, match="no teacher_logits"):  # it was not added
        ClassificationLoss(distillation=dict(kind="hard"))(other(images_of()), [{"label": 1}] * 4)


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_the_published_students_have_the_recipe(size):
    config = vitkit.load_config(f"deit_{size}_distilled_patch16_in1k")
    assert config["optimizer"]["lr"] == pytest.approx(1e-3) and config["data"]["repeated_augmentation"] == 3
    assert config["train"]["epochs"] == 300 and config["criterion"]["distillation"] == dict(kind="hard", weight=0.5)
