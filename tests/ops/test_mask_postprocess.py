import numpy as np
import pytest
import torch
import torch.nn.functional as F
from golden.weights import compare, load_case

from vitkit.engine.build import build_model
from vitkit.errors import ConfigError
from vitkit.model_zoo.converters import convert_official
from vitkit.ops import mask_postprocess
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.ops.mask_postprocess import (
    Geometry,
    PanopticRules,
    instances,
    panoptic,
    resize_rows,
    semantic_map,
    semantic_scores,
)
from vitkit.ops.masks import boxes_around_masks

GEOMETRY = Geometry(padded=(32, 48), image=(29, 40), original=(51, 77))
CHUNKS = [mask_postprocess.CHUNK_VALUES, 5000, 1]


def spec(tasks, **options):
    return dict(type="MaskFormer", backbone=dict(type="ResNet", depth=50, norm="frozen_bn"), tasks=tasks, **options)


def predictions(num_queries=7, num_classes=5):
    torch.manual_seed(0)
    probabilities = (3 * torch.randn(num_queries, num_classes + 1)).softmax(-1)
    return probabilities, 4 * torch.randn(num_queries, 8, 12)


def whole_size(masks, geometry=GEOMETRY):
    """Apply the originals' two steps to all masks at once."""
    x = F.interpolate(masks[None], geometry.padded, mode="bilinear", align_corners=False)
    x = x[..., : geometry.image[0], : geometry.image[1]]
    return F.interpolate(x, geometry.original, mode="bilinear", align_corners=False)[0]


def test_selected_rows_equal_those_of_the_full_map():
    maps = torch.randn(3, 9, 14)
    whole = F.interpolate(maps[None], (31, 20), mode="bilinear", align_corners=False)[0]
    for rows in (range(31), range(0, 4), range(17, 31)):
        torch.testing.assert_close(resize_rows(maps, (31, 20), rows), whole[:, rows.start : rows.stop])


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("resize_masks", [False, True])
def test_semantic_scores_in_chunks_equal_all_rows_at_once(chunk, resize_masks, monkeypatch):
    monkeypatch.setattr(mask_postprocess, "CHUNK_VALUES", chunk)
    probabilities, masks = predictions()
    if resize_masks:
        expected = torch.einsum("qc,qhw->chw", probabilities[:, :-1], whole_size(masks).sigmoid())
    else:
        x = F.interpolate(masks[None], GEOMETRY.padded, mode="bilinear", align_corners=False)[0].sigmoid()
        x = torch.einsum("qc,qhw->chw", probabilities[:, :-1], x)[None, :, :29, :40]
        expected = F.interpolate(x, GEOMETRY.original, mode="bilinear", align_corners=False)[0]
    bands = semantic_scores(probabilities[:, :-1], masks, GEOMETRY, resize_masks=resize_masks)
    torch.testing.assert_close(torch.cat([scores for _, scores in bands], dim=1), expected)
    got = semantic_map(probabilities[:, :-1], masks, GEOMETRY, resize_masks=resize_masks)
    assert (got == expected.argmax(0)).float().mean() > 0.999


@pytest.mark.parametrize("resize_masks", [False, True])
def test_semantic_scores_are_precise_under_autocast(resize_masks):
    probabilities, masks = predictions()
    options = dict(resize_masks=resize_masks)
    expected = torch.cat([x for _, x in semantic_scores(probabilities[:, :-1], masks, GEOMETRY, **options)], dim=1)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.cat([x for _, x in semantic_scores(probabilities[:, :-1], masks, GEOMETRY, **options)], dim=1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_instances_are_the_best_query_class_pairs_with_confident_masks(chunk, monkeypatch):
    monkeypatch.setattr(mask_postprocess, "CHUNK_VALUES", chunk)
    probabilities, masks = predictions()
    things = [True, True, False, True, True]
    found = instances(probabilities[:, :-1], masks, GEOMETRY, things=things, num_instances=20)
    logits = whole_size(masks)
    expected = []
    for index in probabilities[:, :-1].flatten().argsort(descending=True)[:20].tolist():
        query, label = divmod(index, 5)
        inside = logits[query] > 0
        certainty = (logits[query].sigmoid() * inside).sum() / (inside.sum() + 1e-6)
        if things[label]:
            expected.append((float(probabilities[query, label] * certainty), label, int(inside.sum())))
    got = [(s, l, m) for s, l, m in zip(found.scores.tolist(), found.labels.tolist(), found.masks.sum((1, 2)).tolist())]
    for a, b in zip(sorted(got), sorted(expected), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def panoptic_by_loop(probabilities, masks, *, things, object_threshold, overlap_threshold, cut_masks):
    """Merge masks by the originals' loop over full masks."""
    scores, labels = probabilities.max(-1)
    keep = (labels != len(things)) & (scores > object_threshold)
    scores, labels, p = scores[keep], labels[keep], whole_size(masks[keep]).sigmoid()
    ids, segments, stuff = torch.zeros(GEOMETRY.original, dtype=torch.int32), [], {}
    owner = (scores[:, None, None] * p).argmax(0)
    for k, label in enumerate(labels.tolist()):
        owned, own = owner == k, p[k] >= 0.5
        place = owned & own if cut_masks else owned
        if not (owned.any() and own.any() and place.any()) or owned.sum() / own.sum() < overlap_threshold:
            continue
        if not things[label] and label in stuff:
            ids[place] = stuff[label]
            continue
        segments.append((len(segments) + 1, label))
        ids[place] = len(segments)
        if not things[label]:
            stuff[label] = len(segments)
    return ids, segments


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("cut_masks", [False, True])
@pytest.mark.parametrize("overlap", [0.0, 0.2])
def test_panoptic_maps_equal_a_plain_loop(chunk, cut_masks, overlap, monkeypatch):
    monkeypatch.setattr(mask_postprocess, "CHUNK_VALUES", chunk)
    probabilities, masks = predictions(num_queries=12, num_classes=3)
    options = dict(object_threshold=0.3, overlap_threshold=overlap, cut_masks=cut_masks)
    things = [True, False, False]
    found = panoptic(probabilities, masks, GEOMETRY, things=things, rules=PanopticRules(**options))
    ids, segments = panoptic_by_loop(probabilities, masks, things=things, **options)
    assert [(s["id"], s["label"]) for s in found.segments] == segments and len(segments) > 1
    assert (found.segment_ids == ids).float().mean() > 0.999


def test_panoptic_map_is_empty_without_confident_queries():
    probabilities, masks = predictions()
    found = panoptic(probabilities, masks, GEOMETRY, things=[True] * 5, rules=PanopticRules(object_threshold=1.0))
    assert found.segments == [] and not found.segment_ids.any() and found.segment_ids.shape == GEOMETRY.original


def test_boxes_enclose_the_pixels_of_their_masks():
    masks = torch.zeros(2, 6, 9, dtype=torch.bool)
    masks[0, 2:4, 3:8] = True
    assert boxes_around_masks(masks).tolist() == [[3, 2, 8, 4], [0, 0, 0, 0]]
    assert boxes_around_masks(masks[:0]).shape == (0, 4)


def golden(name, model_spec):
    case = load_case(name)
    model = build_model(model_spec).eval()
    model.load_state_dict(convert_official(case.torch_state_dict(), model)[0])
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (IMAGENET_MEAN, IMAGENET_STD))
    images = [(case.torch_inputs()[f"image{i}"] - mean) / std for i in range(2)]
    batch = torch.zeros(2, 3, max(x.shape[1] for x in images), max(x.shape[2] for x in images))
    mask = torch.ones(2, *batch.shape[-2:], dtype=torch.bool)
    for i, image in enumerate(images):
        batch[i, :, : image.shape[1], : image.shape[2]] = image
        mask[i, : image.shape[1], : image.shape[2]] = False
    with torch.no_grad():
        outputs = model(batch, mask)
        return case, model.postprocess(outputs, case.meta["inference"]["output_sizes"])


def test_semantic_inference_equals_the_original():
    options = dict(neck=dict(type="FPNPixelDecoder", out_channels=256), head=dict(type="MaskFormerHead"))
    case, results = golden("maskformer_r50_ade20k_semantic", spec(["semantic"], num_classes=150, **options))
    for i, result in enumerate(results):
        expected = torch.from_numpy(np.asarray(case.expected[f"sem_seg_argmax_{i}"].values))
        assert (result["semantic"] == expected.view_as(result["semantic"])).float().mean() > 0.999


def test_instance_inference_equals_the_original():
    options = dict(neck=dict(type="DeformablePixelDecoder", out_channels=256), head=dict(type="Mask2FormerHead"))
    case, results = golden("mask2former_r50_coco_instance", spec(["instance"], **options))
    for i, result in enumerate(results):
        order = result["scores"].argsort(descending=True)
        report = compare(case, {f"instances_{i}_scores": result["scores"][order].numpy()})
        assert all(line["ok"] for line in report.values()), report
        areas = result["masks"][order].flatten(1).sum(1).double()
        expected = torch.from_numpy(np.asarray(case.expected[f"instances_{i}_mask_area"].values)).double()
        torch.testing.assert_close(areas.sort().values, expected.sort().values, rtol=1e-3, atol=1)
        labels = result["labels"][order]
        wanted = torch.from_numpy(np.asarray(case.expected[f"instances_{i}_classes"].values))
        assert (labels == wanted).float().mean() > 0.95 and labels.sort().values.tolist() == sorted(wanted.tolist())


def test_things_of_the_dataset_override_those_of_the_model():
    options = dict(neck=dict(type="FPNPixelDecoder", out_channels=32), head=dict(type="MaskFormerHead", d_ffn=32))
    with torch.device("meta"):
        model = build_model(spec(["panoptic"], **options), classes=["cat", "sky"], things=[True, False])
        assert model.things == [True, False]
        stated = {**spec(["panoptic"], **options), "num_classes": 2, "things": [False, True]}
        assert build_model(stated).things == [False, True]
        assert build_model(stated, classes=["a", "b"], things=[True] * 2).things == [True] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tasks=[]), "model: tasks is empty; expected any of semantic, instance, panoptic"),
        (dict(tasks=["panoptics"]), "unknown task 'panoptics'. Did you mean 'panoptic'"),
        (dict(things=[True, False]), "model: things has 2 entries, but there are 80 classes"),
        (
            dict(head=dict(type="Mask2FormerHead", num_levels=0)),
            "model.head: Mask2FormerHead: num_levels=0, expected at least 1",
        ),
        (dict(head=dict(type="Mask2FormerHead")), "needs 'mask_features' and 3 other map.* returns mask_features"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    options = dict(neck=dict(type="FPNPixelDecoder", out_channels=32), head=dict(type="MaskFormerHead"))
    with pytest.raises(ConfigError, match=message):
        build_model(spec(["semantic"]) | options | changes)
