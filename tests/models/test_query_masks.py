"""Masks of detectors' queries: every family predicts, trains and returns them (model.head.masks)."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.helpers.every_model import CHANNELS, DENSE, RESNET
from vitkit import build_model
from vitkit.apps.inference import Predictor
from vitkit.errors import ConfigError
from vitkit.models import query_masks
from vitkit.models.dfine import DFINE
from vitkit.ops.mask_postprocess import upsample_to_masks
from vitkit.ops.masks import mask_logits, masks_of_queries
from vitkit.registry import CRITERIA

MASKS = {
    "blocks": "BlockMasks",
    "one block": dict(type="BlockMasks", one_block=True),
    "pyramid": dict(type="PyramidMasks", channels=32),
}
FAMILIES = ["DFINE", "DEIMv2", "RTDETR", "RTDETRv2", "DINO", "DeformableDETR"]
DENOISING = [dict(type="BoxDenoising", num_queries=6, contrastive=True)]
MATCHER = dict(
    type="HungarianBoxMaskMatcher", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0, cost_mask=5.0, cost_dice=5.0
)
SIZES = [(64, 96), (58, 90)]


def build(family, masks="BlockMasks", **options):
    spec = copy.deepcopy(DENSE[family][0])
    spec["head"]["masks"] = masks
    if spec["neck"]["type"] == "PyramidProjection":
        spec["neck"] |= dict(in_features=["res3", "res4", "res5"], num_levels=3)
    torch.manual_seed(0)
    return build_model(dict(dict(spec, type=family, backbone=RESNET, num_classes=3, num_queries=8), **options))


def criterion_of(family, matcher=MATCHER, **settings):
    weights = dict(labels=1.0, l1=5.0, giou=2.0, mask=5.0, dice=5.0)
    if family in ("DFINE", "DEIMv2"):
        spec = dict(type="DFINEMaskCriterion", weights=weights | dict(fgl=0.15, ddf=1.5))
    else:
        spec = dict(type="BoxMaskCriterion", class_loss="varifocal", weights=weights)
    return CRITERIA.build(spec | dict(matcher=matcher) | settings)


def batch(num_objects=(3, 0)):
    """Two images, the second smaller and padded, with boxes around the masks of some objects."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (2, 3, 64, 96), generator=generator, dtype=torch.uint8)
    padding_mask, targets = torch.ones(2, 64, 96, dtype=torch.bool), []
    for i, ((height, width), n) in enumerate(zip(SIZES, num_objects)):
        padding_mask[i, :height, :width] = False
        images[i, :, height:] = 0
        images[i, :, :, width:] = 0
        masks, boxes = torch.zeros(n, height, width, dtype=torch.bool), torch.zeros(n, 4)
        for j in range(n):
            top, left = 5 + 9 * j, 9 + 20 * j
            masks[j, top : top + 20, left : left + 26] = True
            masks[j, top : top + 6, left : left + 6] = False
            boxes[j] = torch.tensor([(left + 13) / width, (top + 10) / height, 26 / width, 20 / height])
        targets.append(
            dict(labels=torch.arange(n) % 3, boxes_cxcywh=boxes, masks=masks, image_size=(height, width), image_id=i)
        )
    return images, padding_mask, targets


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_masks_of_all_its_queries(family, masks):
    model = build(family, MASKS[masks], training_queries=DENOISING if family != "DeformableDETR" else []).train()
    images, padding_mask, targets = batch()
    outputs = model(images, padding_mask, targets if model.uses_targets else None)
    assert "pred_masks" not in outputs, "only masks of matched queries are computed"
    losses = criterion_of(family)(outputs, targets)
    sets = ["", "dn_"] if family != "DeformableDETR" else [""]
    layers = [f"{name}{aux}" for name in sets for aux in ("", "aux1_" if family in ("DFINE", "DEIMv2") else "aux0_")]
    assert {name for name in losses if name.endswith("_dice") or name == "dice"} == {f"{name}dice" for name in layers}
    sum(losses.values()).backward()
    unused = [name for name, parameter in model.head.mask_head.named_parameters() if parameter.grad is None]
    assert not unused and all(torch.isfinite(loss) for loss in losses.values())

    model.eval()
    with torch.no_grad():
        outputs = model(images, padding_mask)
    assert outputs["mask_embed"].shape[:2] == (2, 8) and outputs["input_size"] == (64, 96)
    height, width = outputs["mask_features"].shape[-2:]
    assert (height, width) == (16, 24)
    sizes = [(128, 192), (58, 90)]
    results = model.postprocess(outputs, sizes)
    assert [result["masks"].shape[1:] for result in results] == sizes
    assert model.returns == ("boxes_xyxy", "masks") and model.tasks == ("instance",)


def test_masks_are_those_of_the_detections_resized_to_the_image():
    model = build("DFINE", "BlockMasks").eval()
    images, padding_mask, _ = batch()
    with torch.no_grad():
        outputs = model(images, padding_mask)
        best = model.detections(outputs)
        results = model.postprocess(outputs, [(64, 96), (58, 90)])
    logits = mask_logits(outputs["mask_embed"], outputs["mask_features"])
    assert torch.equal(masks_of_queries(outputs, 0), logits[0])
    first = F.interpolate(logits[:1, best.queries[0]], size=(64, 96), mode="bilinear", align_corners=False)[0] > 0
    assert torch.equal(results[0]["masks"], first)
    # 58 rows are no whole number of a mask's pixels: first enlarged to those of the padded batch.
    second = F.interpolate(logits[1:, best.queries[1]], size=(64, 96), mode="bilinear", align_corners=False)[0]
    assert torch.equal(results[1]["masks"], second[:, :58, :90] > 0)


def test_masks_of_dfine_seg_end_with_their_boxes():
    model = build("DFINE", MASKS["pyramid"]).eval()
    torch.nn.init.constant_(model.head.mask_head.embed.layers[-1].bias, 1.0)  # nearly all pixels are positive
    with torch.no_grad():
        outputs = model(*batch()[:2])
        result = model.postprocess(outputs, [(64, 96), (58, 90)])[0]
    full = F.interpolate(masks_of_queries(outputs, 0)[None].sigmoid(), size=(64, 96), mode="bilinear")[0] >= 0.5
    for mask, box, query in zip(result["masks"], result["boxes_xyxy"], model.detections(outputs).queries[0]):
        left, top, right, bottom = box.clamp(min=0).ceil().int().tolist()
        inside = torch.zeros_like(mask)
        inside[top:bottom, left:right] = True
        assert torch.equal(mask, full[query] & inside)
    assert full.any() and not torch.equal(result["masks"], full[model.detections(outputs).queries[0]])


@pytest.mark.parametrize("masks", ["blocks", "pyramid"])
def test_predictions_upsample_the_masks_of_the_objects_that_are_shown(masks, monkeypatch):
    model = build("DFINE", MASKS[masks], num_detections=20).eval()
    image = np.random.default_rng(0).integers(0, 256, (70, 90, 3), np.uint8)
    predictor = Predictor(model, ["a", "b", "c"])
    (expected,) = predictor.run([image])
    limit = expected["scores"].sort().values[-4].item()
    upsampled = []

    def count(logits, *arguments, **settings):
        upsampled.append(len(logits))
        return upsample_to_masks(logits, *arguments, **settings)

    monkeypatch.setattr(query_masks, "upsample_to_masks", count)
    prediction = predictor(image, threshold=limit)
    assert not upsampled
    assert len(prediction) == 4 == len(prediction.masks) and sum(upsampled) <= 4
    prediction.to_json(), prediction.draw()
    assert sum(upsampled) <= 8  # the drawing makes them once more
    shown = expected["scores"].argsort(descending=True, stable=True)
    assert torch.equal(prediction.masks, expected["masks"][shown[:4]]) and expected["masks"].any()
    lower = prediction.filter("b", score=0.0)
    of_class = shown[expected["labels"][shown] == 1]
    assert torch.equal(lower.masks, expected["masks"][of_class]) and len(of_class) > 1
    assert torch.equal(prediction.fields["masks"][:], expected["masks"])
    assert len(prediction.fields["masks"]) == 20


def test_a_postprocess_of_ones_own_is_the_one_that_predicts():
    class Inverted(DFINE):
        def postprocess(self, outputs, image_sizes):
            return [r | {"masks": ~r["masks"]} for r in super().postprocess(outputs, image_sizes)]

    model = build("DFINE").eval()
    image = np.full((64, 64, 3), 90, np.uint8)
    expected = ~Predictor(model, ["a", "b", "c"])(image, threshold=0.0).masks
    model.__class__ = Inverted
    assert torch.equal(Predictor(model, ["a", "b", "c"])(image, threshold=0.0).masks, expected)


def test_one_block_is_applied_in_inference_only_if_the_config_says_so():
    one, all_blocks = (build("DEIMv2", MASKS[name]) for name in ("one block", "blocks"))
    all_blocks.load_state_dict(one.state_dict())
    images, padding_mask, _ = batch()
    differences = []
    for training in (True, False):
        outputs = []
        for model in (one, all_blocks):
            model.train(training)
            with torch.no_grad():
                outputs.append(masks_of_queries(model(images, padding_mask), 0))
        differences.append((outputs[0] - outputs[1]).abs().max().item())
    assert differences[0] == 0 and differences[1] > 1e-3


def test_a_model_of_boxes_starts_one_with_masks():
    boxes, masks = build("DFINE", None), build("DFINE", "BlockMasks")
    new = {name for name in masks.state_dict() if name not in boxes.state_dict()}
    assert new and all(name.startswith(masks.new_parts) for name in new)
    assert masks.new_parts == ("head.mask_head.",) and boxes.new_parts == ()
    masks.load_state_dict(boxes.state_dict(), strict=False)
    images, padding_mask, _ = batch()
    with torch.no_grad():
        assert torch.equal(*(model.eval()(images, padding_mask)["pred_boxes"] for model in (boxes, masks)))


@pytest.mark.parametrize("mask_loss", ["points", "boxes"])
def test_objects_without_masks_are_trained_by_their_boxes_alone(mask_loss):
    model = build("DFINE", training_queries=DENOISING).train()
    images, padding_mask, targets = batch((3, 2))
    with torch.no_grad():
        outputs = model(images, padding_mask, targets)
    matcher = dict(MATCHER, cost_mask=0.0, cost_dice=0.0)  # the same matches with and without masks
    criterion = criterion_of("DFINE", matcher, mask_loss=mask_loss)
    grid = torch.stack(torch.meshgrid(*2 * [torch.linspace(0, 1, 40)], indexing="xy"), dim=-1).flatten(0, 1)
    criterion.draw_points = lambda purpose, num_masks, count, device: grid[:count].expand(num_masks, -1, -1)

    def losses_with(known, masks):
        parts = [t | dict(has_masks=k, masks=t["masks"] & m) for t, k, m in zip(targets, known, masks)]
        return criterion(outputs, parts)

    yes, no = [torch.ones(n, dtype=torch.bool) for n in (3, 2)], [torch.zeros(n, dtype=torch.bool) for n in (3, 2)]
    full, none = losses_with(yes, [True, True]), losses_with(no, [True, True])
    # What the masks of objects without masks are does not matter.
    half, other_half = (losses_with([yes[0], no[1]], [True, value]) for value in (True, False))
    for name, loss in full.items():
        if name.endswith(("mask", "dice")):
            assert none[name] == 0 < half[name] == other_half[name] != loss
        else:
            assert none[name] == half[name] == loss
    boxes_alone = {key: value for key, value in targets[1].items() if key != "masks"}
    assert criterion(outputs, [targets[0], boxes_alone]) == half


def test_losses_in_boxes_are_those_of_dfine_seg():
    """The definition, pixel by pixel: the cross entropy's sum in the target's box, divided by the box's area; dice."""
    model = build("DFINE").train()
    images, padding_mask, targets = batch((2, 1))
    with torch.no_grad():
        outputs = model(images, padding_mask)
    criterion = criterion_of("DFINE", dict(MATCHER, cost_mask=0.0, cost_dice=0.0), mask_loss="boxes")
    matches = criterion.matcher([([outputs], targets)], input_size=outputs["input_size"])[0][0]
    entropies, dices = [], []
    for image, (queries, objects) in enumerate(matches):
        height, width = SIZES[image]
        for query, j in zip(queries.tolist(), objects.tolist()):
            logits = masks_of_queries(outputs, image)[query]
            padded = torch.zeros(1, 1, 64, 96)
            padded[0, 0, :height, :width] = targets[image]["masks"][j].float()
            true = F.interpolate(padded, size=(16, 24), mode="bilinear", align_corners=False)[0, 0]
            cx, cy, w, h = (
                targets[image]["boxes_cxcywh"][j] * torch.tensor([width, height, width, height]) / 4
            ).tolist()
            left, top, right, bottom = cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2
            rows = [y for y in range(16) if top <= y < bottom]
            columns = [x for x in range(24) if left <= x < right]
            p = torch.stack([logits[y, columns] for y in rows])
            t = torch.stack([true[y, columns] for y in rows])
            entropies.append(
                F.binary_cross_entropy_with_logits(p, t, reduction="sum") / ((right - left) * (bottom - top))
            )
            a, b = p.sigmoid(), t
            dices.append(1 - (2 * (a * b).sum() + 1e-6) / (a.sum() + b.sum() + 1e-6))
    losses = criterion(outputs, targets)
    assert losses["mask"].item() == pytest.approx(5 * torch.stack(entropies).mean().item(), rel=1e-5)
    assert losses["dice"].item() == pytest.approx(5 * torch.stack(dices).mean().item(), rel=1e-5)


def test_costs_of_masks_are_for_layers_that_predict_them():
    model = build("DFINE").train()
    images, padding_mask, targets = batch((2, 1))
    with torch.no_grad():
        outputs = model(images, padding_mask)
    for mask_cost in ("points", "focal"):
        matcher = criterion_of("DFINE", dict(MATCHER, mask_cost=mask_cost)).matcher
        layers = [outputs, *outputs["aux_outputs"]]
        terms = matcher._mask_terms(layers, targets, torch.rand(1, 9, 2), outputs["input_size"])
        assert terms["mask"].shape == terms["dice"].shape == (3, 3, 8)
        assert [bool(term.any()) for term in terms["mask"]] == ["mask_embed" in layer for layer in layers]
        known = [target | dict(has_masks=torch.arange(len(target["labels"])) == 0) for target in targets]
        some = matcher._mask_terms(layers, known, torch.rand(1, 9, 2), outputs["input_size"])
        assert [bool(term.any()) for term in some["dice"].transpose(0, 1)] == [True, False, True]


def test_heads_whose_maps_do_not_fit_are_named():
    coarse = dict(CHANNELS, in_features=["res5"])
    with pytest.raises(ConfigError, match=r"PyramidMasks: the neck's finest map res5 has stride 32: expected 8"):
        build("RTDETR", "PyramidMasks", neck=coarse)
    with pytest.raises(ConfigError, match=r"BlockMask'?.* Did you mean 'BlockMasks'\?"):
        build("DFINE", "BlockMask")
    with pytest.raises(ConfigError, match=r"mask_loss='box'.*: expected 'points' or 'boxes'"):
        criterion_of("DFINE", mask_loss="box")
    with pytest.raises(ConfigError, match=r"mask_cost='dense'.*'points' or 'focal'"):
        criterion_of("DFINE", dict(MATCHER, mask_cost="dense"))
