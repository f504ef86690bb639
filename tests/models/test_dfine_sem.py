"""D-FINE-seg's semantic form: what it predicts, trains with, and starts from."""

import copy

import pytest
import torch

from tests.helpers.every_model import DENSE, RESNET
from vitkit import build_model
from vitkit.errors import ConfigError
from vitkit.losses.per_pixel import dice_loss
from vitkit.registry import CRITERIA
from vitkit.weights.loading import load_weights

SPEC = dict(DENSE["PerPixelClassification D-FINE-seg"][0], type="PerPixelClassification", backbone=RESNET)


def build(**options):
    torch.manual_seed(0)
    return build_model(dict(copy.deepcopy(SPEC), num_classes=3, **options))


def padded_batch():
    """Two images, the second of 50x40 pixels."""
    images = torch.randint(256, (2, 3, 70, 61), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    mask = torch.zeros(2, 70, 61, dtype=torch.bool)
    mask[1, 50:], mask[1, :, 40:] = True, True
    return images, mask


def test_logits_have_stride_4_and_cover_multiples_of_8():
    model = build()
    outputs = model.eval()(*padded_batch())
    assert outputs["pred_semantic"].shape == (2, 3, 18, 16) and outputs["input_size"] == (72, 64)
    assert "aux_outputs" not in outputs
    maps = model.postprocess(outputs, [(70, 61), (100, 80)])
    assert [tuple(each["semantic"].shape) for each in maps] == [(70, 61), (100, 80)]
    (aux,) = model.train()(*padded_batch())["aux_outputs"]
    assert aux["pred_semantic"].shape == (2, 3, 9, 8)


def test_auxiliary_classifier_reads_the_finest_encoded_map_and_not_the_backbone_s():
    neck = dict(SPEC["neck"], in_features=["res4", "res5"], finer="res3")
    model = build_model(dict(copy.deepcopy(SPEC), num_classes=3, neck=neck)).train()
    outputs = model(*padded_batch())
    assert len(model.head.mask_head["pyramid"].lateral) == 3 and outputs["pred_semantic"].shape == (2, 3, 18, 16)
    assert outputs["aux_outputs"][0]["pred_semantic"].shape == (2, 3, 5, 4)


def test_padding_has_no_effect_when_it_is_isolated():
    model = build(isolate_padding=True).eval()
    images, mask = padded_batch()
    images[1, :, 50:], images[1, :, :, 40:] = 7, 7
    together = model(images, mask)["pred_semantic"][1, :, :12, :10]
    alone = model(images[1:, :, :50, :40])["pred_semantic"][0, :, :12, :10]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_dropout_drops_channels_in_training_only():
    model = build()
    seen = []
    model.head.predictor.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.eval()(*padded_batch())
    model.train().head.dropout.p = 0.5
    model(*padded_batch())
    plain, dropped = (((x == 0).flatten(2).all(2)).float().mean() for x in seen)
    assert plain == 0 and 0.2 < dropped < 0.8


def test_training_starts_from_the_mask_features_of_the_instance_form():
    spec = copy.deepcopy(DENSE["DFINE masks"][0])
    spec["head"]["masks"]["channels"] = 128
    torch.manual_seed(1)
    instances = build_model(dict(spec, type="DFINE", backbone=RESNET, num_classes=5, num_queries=4))
    model = build()
    before = copy.deepcopy(model.state_dict())
    load_weights(model, {"model": instances.state_dict()}, new_class_head=True, partial=True)
    state, source = model.state_dict(), instances.state_dict()
    taken = [key for key in state if key.startswith(("backbone.", "neck.", "head.mask_head."))]
    assert sum("pyramid" in key for key in taken) == 15
    assert all(torch.equal(state[key], source[key]) for key in taken)
    assert all(torch.equal(state[key], before[key]) for key in state.keys() - set(taken))


def reference_dice(logits, labels):
    """Return the loss, class by class."""
    probabilities, losses = logits.softmax(1), []
    for c in range(logits.shape[1]):
        p, y = probabilities[:, c][labels >= 0], (labels == c)[labels >= 0].float()
        losses.append(1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1))
    return sum(losses) / len(losses)


def test_dice_loss_sums_over_the_labeled_pixels_of_the_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 9, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(-1, 3, (2, 9, 7), generator=generator)  # the last class is absent
    loss, expected = dice_loss(logits, labels), reference_dice(logits, labels)
    torch.testing.assert_close(loss, expected)
    gradients = (torch.autograd.grad(value, logits)[0] for value in (loss, expected))
    torch.testing.assert_close(*gradients)
    assert dice_loss(logits, torch.full_like(labels, -1)) == 0
    right = torch.nn.functional.one_hot(labels.clamp(min=0), 4).permute(0, 3, 1, 2) * 100.0
    assert dice_loss(right, labels) < 1e-6


def test_dice_loss_is_precise_for_millions_of_pixels():
    logits = torch.tensor([0.0, -2.9]).view(1, 2, 1, 1).expand(1, 2, 1024, 2048)
    labels = torch.zeros(1, 1024, 2048, dtype=torch.int64)
    expected = dice_loss(logits.double(), labels)
    assert dice_loss(logits, labels).item() == pytest.approx(expected.item(), rel=1e-4)


def test_weights_of_the_terms():
    outputs = build().train()(*padded_batch())
    masks = torch.zeros(1, 50, 40, dtype=torch.bool)
    masks[0, 10:30] = True
    targets = [dict(labels=torch.tensor([2]), masks=masks)] * 2
    plain = CRITERIA.build("PerPixelCriterion")(outputs, targets)
    both = CRITERIA.build(dict(type="PerPixelCriterion", dice_weight=2.0, aux_weight=0.4))(outputs, targets)
    assert plain.keys() == {"semantic", "aux0_semantic"} and both.keys() == plain.keys() | {"dice"}
    assert both["semantic"] == plain["semantic"]
    torch.testing.assert_close(both["aux0_semantic"], 0.4 * plain["aux0_semantic"])
    with pytest.raises(ConfigError, match="dice_weight: got -1; expected at least 0"):
        CRITERIA.build(dict(type="PerPixelCriterion", dice_weight=-1))


def test_overfits_a_simple_image():
    model = build().train()
    image = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    image[0, 0, :32], image[0, 2, 32:] = 255, 255
    masks = torch.stack([torch.arange(64) < 32, torch.arange(64) >= 32])[..., None].expand(2, 64, 64)
    criterion = CRITERIA.build(dict(type="PerPixelCriterion", dice_weight=1.0, aux_weight=0.4))
    optimizer, totals = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(40):
        loss = sum(criterion(model(image), [dict(labels=torch.tensor([0, 2]), masks=masks)]).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals.append(loss.item())
    (found,) = model.eval().postprocess(model(image), [(64, 64)])
    wanted = torch.where(torch.arange(64) < 32, 0, 2)[:, None].expand(64, 64)
    assert totals[-1] < 0.5 * totals[0] and (found["semantic"] == wanted).float().mean() > 0.95
