"""Transforms of classified images: determinism, the original implementations' sizes, and mixing of batches."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import build_dataset
from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.data.transforms.classification import (
    ClassificationEvalTransforms,
    ClassificationTrainTransforms,
    seed_generators,
)
from vitkit.data.transforms.mixing import BatchMixing
from vitkit.errors import ConfigError
from vitkit.losses.classification import ClassificationLoss
from vitkit.ops.images import normalize_images
from vitkit.registry import TRANSFORMS
from vitkit.structures import Batch


def draw_image(height=50, width=70):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def apply(transforms, image, seed=0):
    return transforms(AnnotatedImage(image), seed=seed).image


def test_same_seed_gives_the_same_image_without_touching_global_generators():
    transforms = ClassificationTrainTransforms(
        size=32, rand_augment="rand-m9-n3-mstd0.5-inc1", color_jitter=0.4, interpolation="random"
    )
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    images = [apply(transforms, draw_image(), seed) for seed in (7, 7, 8, 2**64 - 1)]
    assert np.array_equal(images[0], images[1]) and not np.array_equal(images[0], images[2])
    assert images[0].shape == (32, 32, 3) and images[0].dtype == np.uint8
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


@pytest.mark.parametrize("magnitude", [0, 10])
@pytest.mark.parametrize("increasing", ["", "-inc1"])
def test_augmentation_works_at_both_ends_of_its_range(magnitude, increasing):
    transforms = ClassificationTrainTransforms(size=8, rand_augment=f"rand-m{magnitude}-n15-p1{increasing}")
    for seed in range(40):
        assert apply(transforms, draw_image(), seed).shape == (8, 8, 3)


def test_without_a_seed_the_numbers_are_fresh():
    with seed_generators(None):
        first = torch.rand(3)
    with seed_generators(None):
        assert not torch.equal(first, torch.rand(3))


@pytest.mark.parametrize(
    ("size", "crop_pct", "short_side"), [(224, 0.875, 256), (256, 0.875, 292), (224, 0.9, 248), (32, 1.0, 32)]
)
def test_evaluation_resizes_and_crops_as_pillow_does(size, crop_pct, short_side):
    image = draw_image(300, 450)
    resized = Image.fromarray(image).resize((int(short_side * 1.5), short_side), Image.Resampling.BICUBIC)
    left, top = round((resized.width - size) / 2), round((resized.height - size) / 2)
    expected = np.asarray(resized.crop((left, top, left + size, top + size)))
    assert np.array_equal(apply(ClassificationEvalTransforms(size=size, crop_pct=crop_pct), image), expected)


def test_an_image_smaller_than_the_crop_is_enlarged():
    assert apply(ClassificationEvalTransforms(size=64), draw_image(10, 12)).shape == (64, 64, 3)
    assert apply(ClassificationTrainTransforms(size=64), draw_image(1, 1)).shape == (64, 64, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(rand_augment="rand-m9-x3"), r"rand_augment='rand-m9-x3'; expected 'rand'.*rand-m9-mstd0\.5-inc1"),
        (dict(erasing=1.5), r"erasing=1\.5; expected 0 to 1"),
        (dict(mixup=-1), r"mixup=-1; expected at least 0"),
        (dict(mixups=0.8), r"unknown argument 'mixups'. Did you mean 'mixup'"),
    ],
)
def test_a_wrong_setting_is_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        TRANSFORMS.build(dict(type="ClassificationTrainTransforms", **arguments))
    with pytest.raises(ConfigError, match=r"crop_pct=1\.2"):
        ClassificationEvalTransforms(crop_pct=1.2)


def test_boxes_are_refused():
    with pytest.raises(ConfigError, match="ClassificationEvalTransforms cannot move boxes.*EvalResize"):
        ClassificationEvalTransforms()(AnnotatedImage(draw_image(), np.ones((1, 4), np.float32), np.zeros(1, np.int64)))


def batch_of(num_images=6, size=32) -> Batch:
    images = torch.randint(256, (num_images, 3, size, size), dtype=torch.uint8)
    return Batch({"images": images}, [{"label": i % 6, "image_id": i} for i in range(num_images)])


@pytest.mark.parametrize("method", ["mixup", "cutmix"])
def test_mixed_images_are_weighted_by_the_shares_in_their_targets(method):
    torch.manual_seed(0), np.random.seed(0)
    batch = batch_of()
    mixed = BatchMixing(6, **{method: 1.0})(batch)
    before = normalize_images(batch.inputs["images"])
    after = mixed.inputs["images"]
    for i in range(6):
        weights, partner = mixed.targets[i]["class_weights"], 5 - i
        own, other = i, partner
        assert weights.sum().item() == pytest.approx(1) and mixed.targets[i]["image_id"] == i
        share = weights[own].item()
        assert weights[other].item() == pytest.approx(1 - share)
        if method == "mixup":
            expected = share * before[i] + (1 - share) * before[partner]
            torch.testing.assert_close(after[i], expected, rtol=0, atol=1e-5)
        else:
            from_partner = (after[i] == before[partner]).all(0) & (before[i] != before[partner]).any(0)
            assert from_partner.float().mean().item() == pytest.approx(1 - share, abs=0.01)
    assert batch.inputs["images"].dtype == torch.uint8 and "class_weights" not in batch.targets[0]


def test_erasing_changes_the_given_share_of_images_and_no_labels():
    torch.manual_seed(0), random.seed(0)
    batch = batch_of(200, 16)
    erased = BatchMixing(6, erasing=0.25)(batch)
    changed = (erased.inputs["images"] != normalize_images(batch.inputs["images"])).flatten(1).any(1)
    assert 0.15 < changed.float().mean() < 0.35
    assert erased.targets == batch.targets


@pytest.mark.parametrize("method", ["mixup", "cutmix", "erasing"])
def test_all_frames_of_a_clip_are_treated_alike(method):
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    frame = torch.randint(256, (6, 3, 1, 32, 32), dtype=torch.uint8)
    batch = Batch({"images": frame.expand(-1, -1, 4, -1, -1)}, [{"label": i} for i in range(6)])
    before = normalize_images(frame)
    after = BatchMixing(6, **{method: 1.0})(batch).inputs["images"]
    assert after.shape == (6, 3, 4, 32, 32)
    changed = after != before
    assert (changed.any() and not changed.all()) or method == "mixup"
    if method == "erasing":
        assert torch.equal(changed.any(1), changed.any(1)[:, :1].expand(-1, 4, -1, -1))
    else:
        torch.testing.assert_close(after, after[:, :, :1].expand_as(after))


def test_an_odd_batch_cannot_be_mixed():
    with pytest.raises(ConfigError, match=r"data\.images_per_gpu=3: mixup and cutmix .* even number"):
        BatchMixing(6, mixup=0.8)(batch_of(3))


def test_smoothing_after_mixing_equals_mixing_smoothed_labels():
    """The originals smooth the labels first."""
    torch.manual_seed(0), np.random.seed(0)
    mixed = BatchMixing(6, mixup=0.8, cutmix=1.0)(batch_of())
    logits = torch.randn(6, 6)
    loss = ClassificationLoss(label_smoothing=0.1)({"logits": logits}, mixed.targets)["cross_entropy"]
    smooth = torch.full((6, 6), 0.1 / 6)
    for i in range(6):
        smooth[i, i] += 0.9
    share = torch.stack([t["class_weights"][i] for i, t in enumerate(mixed.targets)])[:, None]
    wanted = share * smooth + (1 - share) * smooth.flip(0)
    assert loss.item() == pytest.approx(-(wanted * logits.log_softmax(1)).sum(1).mean().item(), rel=1e-6)


def test_a_loader_transforms_training_batches_if_it_has_a_device():
    spec = dict(type="ClassificationTrainTransforms", size=32, mixup=0.8)
    dataset = build_dataset(dict(type="ShapesClassification", num_images=4, transforms=spec))
    data = DataSettings(images_per_gpu=2, num_workers=0)
    for device, dtype in ((torch.device("cpu"), torch.float32), (None, torch.uint8)):
        loader = data.train_loader(dataset, seed=0, device=device)
        assert [batch.inputs["images"].dtype for batch in loader] == [dtype] * 2
