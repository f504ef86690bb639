"""Keypoints of RF-DETR: terms, what is trained without labels, classes, and a run on drawn shapes."""

import copy
import json

import pytest
import torch
from helpers.realtime_models import rf_detr

import vitkit
from tests.helpers.every_model import DENSE, RESNET
from vitkit import build_model, load_config
from vitkit.engine.hooks import Hook
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.model_zoo.converters.rf_detr import OFFICIAL
from vitkit.ops.keypoints import gaussian_keypoint_terms, log_mean_variance
from vitkit.registry import CRITERIA
from vitkit.weights import read_checkpoint
from vitkit.weights.loading import load_weights

CRITERION = load_config("rf_detr_keypoints_coco")["criterion"]
SIZES = [(64, 96), (58, 90)]
POINTS = ("keypoint_l1", "keypoint_findable", "keypoint_visible", "keypoint_nll")


def build(keypoint_classes=None, **changes):
    spec = copy.deepcopy(DENSE["RFDETRKeypoints"][0])
    spec["head"]["keypoint_classes"] = keypoint_classes
    torch.manual_seed(0)
    sizes = dict(type="RFDETRKeypoints", backbone=RESNET, num_classes=3, num_queries=8)
    model = build_model(spec | sizes | changes)
    for name, parameter in model.head.named_parameters():
        if ".embed.layers.2" in name or "keypoint_embed.layers.2" in name:
            torch.nn.init.normal_(parameter, std=0.1)  # points away from the boxes' centers
    return model


def batch(visibility):
    """Return two images, the second smaller and padded, and an object for each row of visibilities in the first."""
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (2, 3, 64, 96), generator=generator, dtype=torch.uint8)
    padding_mask = torch.ones(2, 64, 96, dtype=torch.bool)
    for i, (height, width) in enumerate(SIZES):
        padding_mask[i, :height, :width] = False
    targets = []
    for (height, width), rows in zip(SIZES, (visibility, [])):
        v = torch.tensor(rows, dtype=torch.float32).view(-1, 5)
        boxes = torch.rand(len(v), 4, generator=generator) * 0.3 + 0.3
        xy = torch.rand(len(v), 5, 2, generator=generator) * torch.tensor([width, height])
        points = torch.cat((xy * (v > 0)[..., None], v[..., None]), dim=-1)
        target = dict(labels=torch.arange(len(v)) % 3, boxes_cxcywh=boxes, keypoints=points)
        targets.append(target | dict(image_size=(height, width), image_id=0))
    return pixels, padding_mask, targets


@pytest.mark.parametrize("with_field", [True, False])
def test_objects_without_labeled_points_train_their_box_and_class_alone(with_field):
    model, criterion = build().train(), CRITERIA.build(CRITERION)
    pixels, padding_mask, targets = batch([[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    if not with_field:
        for target in targets:
            del target["keypoints"]
    losses = criterion(model(pixels, padding_mask), targets)
    assert {name for name in losses if name.endswith(POINTS)} == {
        f"{p}{n}" for p in ("", "aux0_", "enc_") for n in POINTS
    }
    assert all(losses[name] == 0 for name in losses if name.endswith(POINTS)) and losses["l1"] > 0
    sum(losses.values()).backward()
    # What a point adds to the logits is trained by the classes, the last row of the last layer.
    gradient = model.head.keypoint_head.embed.layers[-1].weight.grad
    assert not gradient[:7].any() and gradient[7].any()


def test_an_object_with_points_is_trained_beside_one_without():
    model, criterion = build().train(), CRITERIA.build(CRITERION)
    pixels, padding_mask, targets = batch([[2, 1, 0, 2, 0], [0, 0, 0, 0, 0]])
    losses = criterion(model(pixels, padding_mask), targets)
    sum(losses.values()).backward()
    assert losses["keypoint_l1"] > 0 and all(torch.isfinite(loss) for loss in losses.values())
    unused = [n for n, p in model.head.keypoint_head.named_parameters() if p.grad is None]
    assert not unused and model.neck.keypoints.conv1.conv.weight.grad.abs().sum() > 0


def test_targets_with_other_keypoints_are_named():
    model, criterion = build(num_keypoints=4).train(), CRITERIA.build(CRITERION)
    pixels, padding_mask, targets = batch([[2, 1, 0, 2, 0]])
    with pytest.raises(DataError, match="image 0: its objects have 5 keypoints, and the model predicts 4"):
        criterion(model(pixels, padding_mask), targets)
    assert "keypoints" in criterion.needs_targets  # so that data without any are refused before the first step


def test_terms_by_hand():
    predicted = torch.tensor([[[0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0], [0.2, 0.9, 3.0, -1.0, 90.0, 9.0, 90.0]]])
    points = torch.tensor([[[0.3, 0.4, 2.0], [0.0, 0.0, 0.0]]])
    terms = gaussian_keypoint_terms(predicted, points, torch.tensor([0.25]))
    log2, found = torch.tensor(2.0).log(), torch.nn.functional.softplus(torch.tensor(3.0))
    assert terms["keypoint_l1"].item() == pytest.approx(0.3 / 0.5)
    assert terms["keypoint_findable"].item() == pytest.approx(((log2 + found) / 2).item())
    hidden = torch.nn.functional.softplus(torch.tensor(-1.0))
    assert terms["keypoint_visible"].item() == pytest.approx(((log2 + hidden) / 2).item())
    assert terms["keypoint_nll"].item() == pytest.approx(0.5 * (0.04 + 0.01) / 0.25)
    # A covariance by its inverse.
    log_l11, l21, log_l22 = 0.3, 0.7, -0.2
    lower = torch.tensor([[log_l11, 0.0], [l21, log_l22]], dtype=torch.float64)
    lower[0, 0], lower[1, 1] = lower[0, 0].exp(), lower[1, 1].exp()
    trace = torch.linalg.inv(lower @ lower.T).trace()
    one = torch.tensor([[0.0, 0.0, 1.0, 0.0, log_l11, l21, log_l22]], dtype=torch.float64)
    assert log_mean_variance(one).exp().item() == pytest.approx(trace.item())


def test_each_label_has_its_points_and_others_have_none():
    model = build([2, 0]).eval()
    pixels, padding_mask, _ = batch([])
    with torch.no_grad():
        outputs = model(pixels, padding_mask)
        best = model.detections(outputs)
        results = model.postprocess(outputs, SIZES)
    assert outputs["pred_keypoints"].shape == (2, 8, 2, 5, 7) and outputs["keypoint_groups"].tolist() == [1, -1, 0]
    assert {0, 1, 2} == {*best.labels[0].tolist()}
    for i, (height, width) in enumerate(SIZES):
        assert (best.scores[i][1:] <= best.scores[i][:-1]).all()
        for points, label, query in zip(results[i]["keypoints"], best.labels[i], best.queries[i]):
            group = outputs["keypoint_groups"][label]
            of_query = outputs["pred_keypoints"][i, query, group]
            expected = torch.cat((of_query[:, :2] * torch.tensor([width, height]), of_query[:, 2:3].sigmoid()), dim=1)
            torch.testing.assert_close(points, expected if group >= 0 else torch.zeros(5, 3))


def test_uncertain_points_lower_the_score():
    model = build().eval()
    pixels, padding_mask, _ = batch([])
    with torch.no_grad():
        outputs = model(pixels, padding_mask)
        fused = model.detections(outputs).scores
        model.score_uncertainty = 0.0
        plain = model.detections(outputs)
        assert torch.equal(plain.scores, outputs["pred_logits"].sigmoid().flatten(1).topk(24, dim=1).values)
        model.score_uncertainty = 0.2
        outputs["pred_keypoints"][..., 4:] = torch.tensor([3.0, 0.0, 3.0])  # more certain
        assert (model.detections(outputs).scores > fused).all()


def test_a_model_of_boxes_starts_one_with_keypoints():
    boxes = build_model(dict(DENSE["RFDETR"][0], type="RFDETR", backbone=RESNET, num_classes=3, num_queries=8))
    model = build()
    new = [name for name in model.state_dict() if name not in boxes.state_dict()]
    assert new and all(name.startswith(model.new_parts) for name in new)
    report = load_weights(model, boxes.state_dict(), new_class_head=True)
    assert set(report.new_parts) == set(model.new_parts)
    assert torch.equal(model.state_dict()["neck.conv1.conv.weight"], boxes.state_dict()["neck.conv1.conv.weight"])


def test_shared_points_cannot_be_written_in_the_originals_names():
    model = rf_detr(resolution=64, layers=1, queries=4, groups=2, classes=3, keypoints=2)
    with pytest.raises(CheckpointError, match="3 classes share their keypoints"):
        OFFICIAL[0].table.write(model.state_dict(), model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_keypoints=0), "num_keypoints=0: expected at least 1"),
        (dict(keypoint_classes=[3]), r"keypoint_classes=\[3\]: expected different labels in 0\.\.2"),
        (dict(keypoint_classes=[1, 1]), r"keypoint_classes=\[1, 1\]: expected different labels"),
        (dict(keypoint_classes=[]), r"keypoint_classes=\[\]: expected different labels"),
        (dict(score_uncertainty=-1.0), r"score_uncertainty=-1\.0: expected a number from 0"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(**changes)


def test_masks_and_keypoints_exclude_each_other():
    spec = copy.deepcopy(DENSE["RFDETRSeg"][0])
    with pytest.raises(ConfigError, match="masks=True and num_keypoints exclude each other"):
        build_model(dict(spec, type="RFDETRKeypoints", backbone=RESNET, num_classes=3))


class Killed(Hook):
    def after_step(self, run, step):
        if run.progress.step == 13:
            raise ZeroDivisionError


def train(folder, hooks=()):
    changes = {
        "data.train.num_images": 64,
        "data.val.num_images": 8,
        "data.images_per_gpu": 8,
        "schedule.warmup_steps": 4,
        "train.epochs": 3,
        "train.log_every": 1,
        "train.save_every_steps": 5,
        "train.keep_checkpoints": 2,
    }
    vitkit.train("quickstart/keypoints", run_dir=folder, device="cpu", hooks=hooks, **changes)


def test_a_run_on_drawn_shapes_learns_and_a_killed_one_continues_bit_for_bit(tmp_path):
    train(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "parts", hooks=[Killed()])
    vitkit.train(resume=tmp_path / "parts", device="cpu")
    one, other = (read_checkpoint(tmp_path / name / "last.pth") for name in ("whole", "parts"))
    assert one["model"].keys() == other["model"].keys() and one["keypoints"]["names"] == other["keypoints"]["names"]
    assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())
    losses = losses_of(tmp_path / "whole")
    assert losses[-1]["loss"] < 0.7 * losses[0]["loss"]
    assert losses[-1]["losses"]["keypoint_l1"] < losses[0]["losses"]["keypoint_l1"]
    assert losses == losses_of(tmp_path / "parts")


def losses_of(folder):
    records = map(json.loads, (folder / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [{name: r[name] for name in ("step", "loss", "losses")} for r in records if r["kind"] == "train"]
