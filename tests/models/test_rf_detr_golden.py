"""RF-DETR, RF-DETR-Seg and its keypoints with the golden weights against the official implementation, in float64.

Recorded points replace random ones.
"""

import numpy as np
import pytest
import torch
from golden.weights import compare, grad_projection, load_case, rng_for
from helpers.realtime_models import rf_detr

from vitkit.model_zoo.converters import convert_official
from vitkit.model_zoo.converters.rf_detr import OFFICIAL
from vitkit.registry import CRITERIA

TERMS = {"labels": "loss_ce", "l1": "loss_bbox", "giou": "loss_giou", "mask": "loss_mask_ce", "dice": "loss_mask_dice"}
TERMS |= {f"keypoint_{name}": f"loss_keypoints_{name}" for name in ("l1", "findable", "visible", "nll")}
COSTS = dict(activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0)
BOXES = dict(
    type="SetCriterion",
    class_loss="iou_aware",
    weights=dict(labels=1.0, l1=5.0, giou=2.0),
    matcher=dict(type="HungarianMatcher", **COSTS),
)
MASKS = dict(
    type="BoxMaskCriterion",
    weights=dict(labels=5.0, l1=5.0, giou=2.0, mask=5.0, dice=5.0),
    matcher=dict(type="HungarianBoxMaskMatcher", **COSTS, cost_mask=5.0, cost_dice=5.0),
)
KEYPOINTS = dict(
    type="BoxKeypointCriterion",
    class_loss="iou_aware",
    weights=dict(
        labels=2.0, l1=5.0, giou=2.0, keypoint_l1=1.0, keypoint_findable=1.0, keypoint_visible=1.0, keypoint_nll=1.0
    ),
    matcher=dict(type="HungarianBoxKeypointMatcher", **COSTS),
)
CRITERION_OF = {"rf_detr": BOXES, "rf_detr_seg": MASKS, "rf_detr_keypoints": KEYPOINTS}
FORM_OF = {"rf_detr": "", "rf_detr_seg": ", with masks", "rf_detr_keypoints": ", with keypoints"}
PREDICTIONS = ("pred_logits", "pred_boxes", "pred_keypoints")
SETTINGS = ("resolution", "layers", "queries", "windows", "patch", "groups", "masks", "classes")


@pytest.fixture(scope="module", params=CRITERION_OF)
def case(request):
    return load_case(request.param)


@pytest.fixture(scope="module")
def model(case):
    settings = case.meta["settings"]
    points = {name: settings[name] for name in ("keypoints", "keypoint_classes") if name in settings}
    model = rf_detr(**{name: settings[name] for name in SETTINGS}, **points)
    state, converter = convert_official(case.torch_state_dict(), model)
    assert converter.name == f"roboflow/rf-detr{FORM_OF[case.name]}"
    model.load_state_dict(state)
    return model.double()


def images(case):
    return case.torch_inputs()["images"].double()


def targets_of(case, variant):
    names = {"labels": "labels", "boxes": "boxes_cxcywh", "masks": "masks"}
    targets = [
        {names[field]: torch.from_numpy(value) for field, value in image.items() if field in names}
        for image in case.targets[variant]
    ]
    for target, image in zip(targets, case.targets[variant]):
        if "keypoints" in image:
            height, width = target["image_size"] = (96, 64)
            target["keypoints"] = torch.from_numpy(image["keypoints"] * [width, height, 1])
    return targets


def points(count):
    return torch.from_numpy(rng_for(f"points:{count}").random((1, count, 2)))


def assert_golden(case, outputs):
    report = compare(case, {name: value.detach().float().numpy() for name, value in outputs.items()}, rtol=1e-5)
    assert all(line["ok"] for line in report.values()), report


def test_the_official_names_are_written_back(case, model):
    written = OFFICIAL[0].table.write(model.state_dict(), model)
    assert written.keys() == case.state_dict.keys()
    stored = case.torch_state_dict()
    assert all(torch.equal(value.float().cpu(), stored[key].float()) for key, value in written.items())


def test_inference_and_results_equal_the_original(case, model):
    with torch.no_grad():
        outputs = model.eval()(images(case))
    (first,) = outputs["training_outputs"]
    named = {f"enc/{name}": first[name] for name in PREDICTIONS if name in first}
    named |= {name: outputs[name] for name in (*PREDICTIONS, "pred_masks") if name in outputs}
    assert_golden(case, named)
    sizes = case.meta["post"]["target_sizes"]
    results = model.postprocess(outputs, sizes)
    fields = {"scores": "scores", "labels": "labels", "boxes": "boxes_xyxy", "keypoints": "keypoints"}
    for output, field in fields.items():
        if field in results[0]:
            assert_golden(case, {f"post/{output}": torch.stack([result[field] for result in results])})
    if case.name == "rf_detr_seg":
        for i, (result, size) in enumerate(zip(results, sizes)):
            with np.load(f"tests/golden/{case.name}.npz") as data:
                bits = np.unpackbits(data[f"post/masks/{i}"])[: result["masks"].numel()]
            assert result["masks"].shape[1:] == tuple(size)
            assert np.array_equal(result["masks"].numpy().ravel(), bits.astype(bool))


@pytest.mark.parametrize("variant", ["objects", "one_empty"])
def test_matchings_with_keypoints_equal_the_original(case, model, variant):
    if case.name != "rf_detr_keypoints":
        pytest.skip("their terms show it")
    targets = targets_of(case, variant)
    with torch.no_grad():
        outputs = model.train()(images(case), None, targets)
    main, first = CRITERIA.build(KEYPOINTS).match(outputs, targets)
    layers = {"": (main, 0), "_0": (main, 1), "_enc": (first, 0)}
    indices = case.losses[variant]["indices"]
    assert indices.keys() == layers.keys()
    for suffix, (sets, layer) in layers.items():
        for image, (theirs, objects) in enumerate(indices[suffix]):
            pairs = []
            for group in range(case.meta["settings"]["groups"]):
                query, target = sets.matches[group * len(sets.prefixes) + layer][image]
                pairs += zip((query + group * case.meta["settings"]["queries"]).tolist(), target.tolist())
            assert sorted(pairs) == sorted(zip(theirs.tolist(), objects.tolist())), (suffix, image)


@pytest.mark.parametrize("variant", ["objects", "one_empty"])
def test_losses_and_gradients_equal_the_original(case, model, variant, monkeypatch):
    criterion = CRITERIA.build(CRITERION_OF[case.name])
    if case.name == "rf_detr_seg":
        monkeypatch.setattr(criterion.matcher, "draw_points", lambda count, device: points(count).float().to(device))
        monkeypatch.setattr(
            criterion,
            "draw_points",
            lambda purpose, masks, count, device: points(count).float().to(device).expand(masks, -1, -1),
        )
    outputs = model.train()(images(case), None, targets_of(case, variant))
    if variant == "objects":
        # The original's groups are in the order of their numbers; here, the first comes last among the rows.
        first, *rest = outputs["training_outputs"][:3]
        groups = [entry for entry in outputs["training_outputs"] if entry["name"] == ""]
        for name in PREDICTIONS if case.name == "rf_detr_keypoints" else PREDICTIONS[:2]:
            assert_golden(case, {f"train/{name}": torch.cat([outputs[name], *(g[name] for g in groups)], dim=1)})
            assert_golden(case, {f"train/enc/{name}": torch.cat([first[name], *(g[name] for g in rest)], dim=1)})
    losses = criterion(outputs, targets_of(case, variant))
    golden = case.losses[variant]
    num_layers = case.meta["settings"]["layers"]
    prefixes = {"": "", "enc_": "_enc"} | {f"aux{i}_": f"_{i}" for i in range(num_layers - 1)}
    terms = {ours: TERMS[ours] for ours in criterion.terms}
    assert losses.keys() == {f"{prefix}{term}" for prefix in prefixes for term in terms}
    for prefix, suffix in prefixes.items():
        for ours, theirs in terms.items():
            weighted = golden["terms"][theirs + suffix] * golden["weights"][theirs]
            assert losses[prefix + ours].item() == pytest.approx(weighted, rel=1e-4), (prefix, ours)
    total = sum(losses.values())
    assert total.item() == pytest.approx(golden["total"], rel=1e-4)
    if variant not in case.grads:
        return
    model.zero_grad()
    total.backward()
    grads = OFFICIAL[0].table.write({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, model)
    grads = {name: grad for name, grad in grads.items() if not name.endswith("mask_token")}
    assert grads.keys() == case.grads[variant].keys()
    for name, grad in grads.items():
        norm, projection = case.grads[variant][name]
        got_norm, got_projection = grad_projection(name, grad.numpy())
        assert got_norm == pytest.approx(norm, rel=1e-3, abs=1e-5), name
        assert got_projection == pytest.approx(projection, abs=2e-3 * norm + 1e-5), name
