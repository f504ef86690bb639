import pytest
import torch
import torchvision
from torch import nn

from vitkit import build_model, load_weights
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.ops.images import normalize_images

CLASSES = [f"class {i}" for i in range(10)]
SPEC = dict(type="Classifier", backbone=dict(type="resnet18", pretrained=False))


def images_of(*size):
    return torch.randint(256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_logits_equal_those_of_the_backbone_on_normalized_images():
    model = build_model(SPEC, classes=CLASSES).eval()
    images = images_of(2, 3, 45, 61)
    outputs = model(images, torch.zeros(2, 45, 61, dtype=torch.bool))
    assert outputs["logits"].shape == (2, 10)
    torch.testing.assert_close(outputs["logits"], model.backbone(normalize_images(images)))
    torch.testing.assert_close(outputs["logits"], model(normalize_images(images))["logits"])
    predictions = model.postprocess(outputs, [(45, 61)] * 2)
    for prediction, logits in zip(predictions, outputs["logits"]):
        torch.testing.assert_close(prediction["class_scores"], logits.softmax(0))


def test_pixel_statistics_come_from_the_backbone():
    class Sum(nn.Module):
        def forward(self, images):
            return images.flatten(1)

    model = build_model(dict(type="Classifier", backbone=Sum(), pixel_mean=(0.5,) * 3, pixel_std=(0.5, 0.5, 0.25)))
    images = images_of(1, 3, 4, 5)
    expected = (images / 255 - 0.5) / torch.tensor([0.5, 0.5, 0.25]).view(3, 1, 1)
    torch.testing.assert_close(model(images)["logits"].view(1, 3, 4, 5), expected, rtol=0, atol=1e-5)
    assert not model.state_dict()


CLIP_BACKBONES = {
    "timesformer": dict(type="TimeSformer", d_model=16, depth=1, num_heads=2, image_size=32, num_frames=4),
    "mvit": dict(type="MViT", embed_dim=16, depths=[1, 1, 1, 1], num_heads=1, image_size=32, num_frames=4),
    "nonlocal": dict(type="ClipResNet", positions={"res3": [0]}),
}


@pytest.mark.parametrize("name", CLIP_BACKBONES)
@pytest.mark.parametrize("pixels", [dict(), dict(pixel_mean=(0.45,) * 3, pixel_std=(0.225,) * 3)])
def test_uint8_clips_are_normalized_and_classified(name, pixels):
    spec = dict(type="Classifier", backbone=CLIP_BACKBONES[name], **pixels)
    model = build_model(spec, classes=CLASSES).eval()
    clips = images_of(2, 3, 4, 32, 32)
    normalized = normalize_images(clips)
    if pixels:
        normalized = (clips / 255 - 0.45) / 0.225
    with torch.no_grad():
        outputs = model(clips)
        torch.testing.assert_close(outputs["logits"], model.backbone(normalized), atol=1e-4, rtol=1e-4)
    scores = model.postprocess(outputs, [(32, 32)] * 2)
    assert len(scores) == 2 and scores[0]["class_scores"].shape == (10,)
    with pytest.raises(DataError, match=r"expected \(B, 3, T, H, W\)"):
        model(images_of(2, 3, 32, 32))


def test_clips_are_refused_by_a_backbone_of_images():
    model = build_model(dict(type="Classifier", backbone=dict(type="ViT", d_model=16, depth=1, num_heads=2)))
    with pytest.raises(DataError, match=r"expected \(B, 3, H, W\)"):
        model(images_of(2, 3, 4, 32, 32))


def test_every_parameter_gets_a_finite_gradient():
    model = build_model(SPEC, classes=CLASSES)
    model(images_of(2, 3, 64, 64))["logits"].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_published_weights_load_and_reproduce_the_original_logits():
    torch.manual_seed(0)
    original = torchvision.models.resnet18().eval()
    model = build_model(SPEC).eval()
    report = load_weights(model, original.state_dict())
    assert not report.missing and not report.unexpected
    images = normalize_images(images_of(2, 3, 64, 64))
    torch.testing.assert_close(model(images)["logits"], original(images), rtol=1e-4, atol=1e-5)


def test_head_for_other_classes_is_reinitialized_only_on_request():
    state = {"model": build_model(SPEC, classes=CLASSES).state_dict(), "classes": CLASSES}
    same = build_model(SPEC, classes=CLASSES)
    assert not load_weights(same, state, classes=CLASSES).reinitialized
    with pytest.raises(CheckpointError, match="class head is for other classes"):
        load_weights(same, state, classes=[*CLASSES[:-1], "another"])
    other = build_model(SPEC, classes=CLASSES[:3])
    report = load_weights(other, state, classes=CLASSES[:3], new_class_head=True)
    assert not report.reinitialized and not report.class_rows.new
    assert torch.equal(other.backbone.fc.weight, state["model"]["backbone.fc.weight"][:3])
    others = [f"other {k}" for k in range(3)]
    report = load_weights(build_model(SPEC, classes=others), state, classes=others, new_class_head=True)
    assert report.reinitialized == ["backbone.fc.weight", "backbone.fc.bias"]


def test_config_of_the_backbone_may_set_neither_features_nor_classes():
    with pytest.raises(ConfigError, match=r"a classifier \(num_classes\) returns no features. Leave it out"):
        build_model({**SPEC, "backbone": dict(type="resnet18", out_features=["res5"])})
    with pytest.raises(ConfigError, match="num_classes is set by its owner"):
        build_model({**SPEC, "backbone": dict(type="resnet18", num_classes=3)})


def test_classifier_compiles_without_graph_breaks():
    model = build_model(SPEC, classes=CLASSES).eval()
    explained = torch._dynamo.explain(model)(images_of(2, 3, 32, 32))
    assert explained.graph_break_count == 0
