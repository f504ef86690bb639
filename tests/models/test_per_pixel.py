"""Per-pixel classification: logits of every pixel, their loss, and the way back to the original image."""

import pytest
import torch
import torch.nn.functional as F

from vitkit.apps.training.tta import MultiScaleFlip
from vitkit.engine.build import build_model
from vitkit.errors import DataError
from vitkit.ops.mask_postprocess import Geometry, upsample, upsample_in_bands
from vitkit.registry import CRITERIA

NUM_CLASSES = 5
HEADS = {
    "baseline": dict(type="PerPixelBaselineHead"),
    "plus": dict(type="PerPixelBaselinePlusHead", d_model=32, num_heads=4, d_ffn=32, num_decoder_layers=3),
}


@pytest.fixture(params=HEADS)
def model(request):
    torch.manual_seed(0)
    return build_model(
        dict(
            type="PerPixelClassification",
            num_classes=NUM_CLASSES,
            backbone=dict(type="ResNet", depth=18),
            neck=dict(type="FPNPixelDecoder", out_channels=32, mask_channels=16),
            head=HEADS[request.param],
        )
    )


def padded_batch():
    """Two images, the second of 50x40 pixels."""
    images = torch.randint(256, (2, 3, 70, 61), dtype=torch.uint8)
    mask = torch.zeros(2, 70, 61, dtype=torch.bool)
    mask[1, 50:], mask[1, :, 40:] = True, True
    return images, mask


def target(labels, size):
    """Return a target whose rows are bands of these classes; None: no class."""
    bands = torch.arange(size[0]) * len(labels) // size[0]
    masks = [(bands == i)[:, None].expand(size) for i, label in enumerate(labels) if label is not None]
    return dict(
        labels=torch.tensor([label for label in labels if label is not None], dtype=torch.int64),
        masks=torch.stack(masks) if masks else torch.zeros(0, *size, dtype=torch.bool),
        image_id=3,
    )


def test_outputs_cover_the_images_rounded_up_to_the_stride(model):
    outputs = model(*padded_batch())
    assert outputs["pred_semantic"].shape == (2, NUM_CLASSES, 18, 16)
    assert outputs["input_size"] == (72, 64) and outputs["image_sizes"].tolist() == [[70, 61], [50, 40]]
    for layer in outputs.get("aux_outputs", ()):
        assert layer["pred_semantic"].shape == (2, NUM_CLASSES, 18, 16)
    assert len(outputs.get("aux_outputs", ())) == (2 if hasattr(model.head, "decoder") else 0)


def test_semantic_map_has_the_original_size_and_the_most_likely_classes(model):
    outputs = model.eval()(*padded_batch())
    first, second = model.postprocess(outputs, [(140, 122), (25, 80)])
    assert first["semantic"].shape == (140, 122) and second["semantic"].shape == (25, 80)
    logits = F.interpolate(outputs["pred_semantic"][1:], size=(72, 64), mode="bilinear")[..., :50, :40]
    expected = F.interpolate(logits, size=(25, 80), mode="bilinear")[0].argmax(0)
    assert (second["semantic"] == expected).float().mean() > 0.999  # among equal values, either may be first


def test_map_computed_in_bands_of_rows_equals_the_full_map(monkeypatch):
    maps = torch.randn(3, 9, 8)
    geometry = Geometry((36, 32), (30, 31), (77, 45))
    monkeypatch.setattr("vitkit.ops.mask_postprocess.CHUNK_VALUES", 3 * 45 * 10)
    bands = list(upsample_in_bands(maps, geometry))
    assert len(bands) == 8
    torch.testing.assert_close(torch.cat([band for _, band in bands], dim=1), upsample(maps, geometry))
    ((rows, some),) = upsample_in_bands(maps, geometry, within=range(20, 28))
    assert rows == range(20, 28)
    torch.testing.assert_close(some, upsample(maps, geometry)[:, 20:28])


def test_test_time_augmentation_uses_its_scores(model):
    views = MultiScaleFlip(model.eval(), scales=(0.75, 1.0))
    images, mask = padded_batch()
    maps = views.postprocess(views(images, mask), [(70, 61), (50, 40)])
    assert [tuple(m["semantic"].shape) for m in maps] == [(70, 61), (50, 40)]


def test_the_loss_is_the_cross_entropy_of_labeled_pixels(model):
    criterion = CRITERIA.build("PerPixelCriterion")
    outputs = model(*padded_batch())
    targets = [target([0, None, 4], (70, 61)), target([2], (50, 40))]
    losses = criterion(outputs, targets)
    logits = F.interpolate(outputs["pred_semantic"], size=(72, 64), mode="bilinear", align_corners=False)
    wanted = torch.full((2, 72, 64), -100)
    rows = torch.arange(70) * 3 // 70
    wanted[0, :70, :61] = torch.tensor([0, -100, 4])[rows][:, None]
    wanted[1, :50, :40] = 2
    torch.testing.assert_close(losses["semantic"], F.cross_entropy(logits, wanted))
    right = (logits.argmax(1) == wanted).sum() / (wanted >= 0).sum()
    assert criterion.meters["pixel_accuracy"].compute(torch.device("cpu"))[0] == pytest.approx(float(right))
    sum(losses.values()).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_loss_is_zero_with_the_same_keys_without_labeled_pixels(model):
    criterion = CRITERIA.build("PerPixelCriterion")
    outputs = model(*padded_batch())
    losses = criterion(outputs, [target([], (70, 61)), target([None], (50, 40))])
    assert losses.keys() == criterion(outputs, [target([1], (70, 61)), target([2], (50, 40))]).keys()
    assert all(float(loss.detach()) == 0 for loss in losses.values())
    sum(losses.values()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_label_out_of_range_names_image_and_label(model):
    criterion = CRITERIA.build("PerPixelCriterion")
    with pytest.raises(DataError, match=r"image 1 of the batch \(image_id 3\) has labels \[1, 5\]; expected 0..4"):
        criterion(model(*padded_batch()), [target([0], (70, 61)), target([1, 5], (50, 40))])


def test_overfits_a_simple_image(model):
    torch.manual_seed(0)
    image = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    image[0, 0, :32], image[0, 2, 32:] = 255, 255
    criterion = CRITERIA.build("PerPixelCriterion")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(40):
        loss = sum(criterion(model(image), [target([1, 3], (64, 64))]).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    (found,) = model.eval().postprocess(model(image), [(64, 64)])
    wanted = torch.where(torch.arange(64) < 32, 1, 3)[:, None].expand(64, 64)
    assert (found["semantic"] == wanted).float().mean() > 0.95
