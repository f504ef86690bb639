"""ECPose: terms, noise of denoising, what is left out, a wrong number of keypoints, and a run on drawn shapes."""

import copy
import json
import math

import pytest
import torch

import vitkit
from tests.helpers.every_model import DENSE
from vitkit import build_model
from vitkit.configs.ecpose import config
from vitkit.engine.hooks import Hook
from vitkit.errors import ConfigError, DataError
from vitkit.heads.detrpose import DETRPoseHead
from vitkit.heads.dino import DINOHead
from vitkit.ops.keypoints import keep_labeled_objects, labeled_poses, pose_terms, sigmas_of_keypoints
from vitkit.registry import CRITERIA, TRAINING_QUERIES
from vitkit.structures import FeatureInfo
from vitkit.training_queries.keypoint_denoising import KeypointNoise
from vitkit.weights import read_checkpoint

CRITERION = config("s")["criterion"]
HEIGHT, WIDTH = 64, 96


def build(**changes):
    torch.manual_seed(0)
    spec = copy.deepcopy(DENSE["ECPose"][0]) | dict(type="ECPose", num_classes=3, num_queries=8)
    return build_model(spec | dict(training_queries=["KeypointDenoising"]) | changes)


def batch(*visibility, num_keypoints=5):
    """Return two images, and an object of the first for each row of visibilities."""
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (2, 3, HEIGHT, WIDTH), generator=generator, dtype=torch.uint8)
    targets = []
    for rows in (visibility, ()):
        v = torch.tensor(rows, dtype=torch.float32).view(-1, num_keypoints)
        xy = (0.4 + 0.2 * torch.rand(len(v), num_keypoints, 2, generator=generator)) * torch.tensor([WIDTH, HEIGHT])
        target = dict(
            labels=torch.arange(len(v)) % 3,
            boxes_cxcywh=torch.rand(len(v), 4, generator=generator) * 0.3 + 0.3,
            keypoints=torch.cat((xy * (v > 0)[..., None], v[..., None]), dim=-1),
            areas=100 + 200 * torch.rand(len(v), generator=generator),
            image_size=(HEIGHT, WIDTH),
            image_id=7,
        )
        targets.append(target)
    return pixels, targets


def losses_of_batch(model, pixels, targets):
    torch.manual_seed(1)
    return CRITERIA.build(CRITERION)(model(pixels, None, targets), targets)


def test_terms_by_hand():
    target = dict(labels=torch.zeros(1, dtype=torch.int64), boxes_cxcywh=torch.full((1, 4), 0.5))
    points = torch.tensor([[[20.0, 30.0, 2.0], [50.0, 40.0, 1.0], [0.0, 0.0, 0.0]]])
    target |= dict(keypoints=points, areas=torch.tensor([400.0]), image_size=(100, 200))
    predicted = torch.tensor([[[0.1, 0.34], [0.25, 0.4], [0.9, 0.9]]])  # 4 pixels below; exact; not labeled
    terms = pose_terms(predicted, labeled_poses([target], 3), torch.tensor([0.1, 0.05, 0.05]))
    similarity = math.exp(-(4**2) / (2 * 400 * 0.2**2))
    assert terms["oks"].item() == pytest.approx(1 - (similarity + 1) / 2, rel=1e-5)
    assert terms["keypoint_l1"].item() == pytest.approx(0.04, rel=1e-4)
    far = pose_terms(predicted + 100, labeled_poses([target], 3), torch.tensor([0.1, 0.05, 0.05]))
    assert far["oks"].item() == pytest.approx(1 - 1e-6)


def test_objects_without_a_labeled_point_are_left_out():
    model = build().train()
    pixels, targets = batch([2, 1, 0, 2, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1])
    kept = keep_labeled_objects(targets, 5)
    assert [len(target["labels"]) for target in kept] == [2, 0] and kept[1] is targets[1]
    assert torch.equal(kept[0]["areas"], targets[0]["areas"][[0, 2]])
    losses, expected = losses_of_batch(model, pixels, targets), losses_of_batch(model, pixels, kept)
    assert all(torch.equal(losses[name], value) for name, value in expected.items()) and losses["keypoint_l1"] > 0


@pytest.mark.parametrize("with_field", [True, False])
def test_batches_without_persons_train(with_field):
    model = build().train()
    pixels, targets = batch()
    if not with_field:
        for target in targets:
            del target["keypoints"], target["areas"]
    losses = losses_of_batch(model, pixels, targets)
    sum(losses.values()).backward()
    assert losses.keys() == losses_of_batch(model, *batch([2, 1, 0, 2, 0])).keys()
    assert all(torch.isfinite(value) for value in losses.values()) and losses["labels"] > 0
    assert losses["keypoint_l1"] == losses["dn_oks"] == 0
    # What only keypoints train has a gradient all the same, as synchronizing gradients needs.
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not unused and not model.head.decoder.keypoint_embed.layers[2].weight.grad.any()


def test_targets_with_other_keypoints_are_named():
    model = build(num_keypoints=4).train()
    pixels, targets = batch([2, 1, 0, 2, 0])
    message = "image 7: its objects have 5 keypoints, and the model predicts 4. Set model.num_keypoints"
    with pytest.raises(DataError, match=message):
        CRITERIA.build(CRITERION)(model.eval()(pixels), targets)
    with pytest.raises(DataError, match=message):  # in denoising, before the criterion
        model.train()(pixels, None, targets)
    assert "keypoints" in CRITERIA.build(CRITERION).needs_targets  # so that data without any are refused


def test_sigmas_of_the_data_are_used():
    assert sigmas_of_keypoints(17, None)[[0, 16]].tolist() == pytest.approx([0.026, 0.089])
    assert sigmas_of_keypoints(3, None).tolist() == pytest.approx([0.05] * 3)
    model = build(num_keypoints=5, keypoint_sigmas=[0.1, 0.2, 0.3, 0.4, 0.5]).train()
    assert model.head.keypoint_sigmas.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    pixels, targets = batch([2, 1, 0, 2, 0])
    outputs = model(pixels, None, targets)
    exact, loose = (
        CRITERIA.build(dict(CRITERION, keypoint_sigmas=[sigma] * 5))(outputs, targets)["oks"] for sigma in (0.05, 0.5)
    )
    assert loose < exact
    with pytest.raises(ConfigError, match=r"keypoint_sigmas=\[.*\]: expected 5 numbers above 0"):
        CRITERIA.build(dict(CRITERION, keypoint_sigmas=[0.05] * 4))(outputs, targets)


def test_noised_keypoints_have_the_similarities_that_are_drawn():
    model = build().train()
    _, targets = batch([2, 1, 0, 2, 0], [1, 1, 1, 1, 1])
    denoising = model.training_queries.denoising
    torch.manual_seed(0)
    (noised,) = denoising(model.head, targets, None)
    points = noised["queries"].references
    assert points.shape == (2, 40, 6, 2) and noised["repeats"] == 10  # ten groups of two copies of two
    assert (points[1] == 0.5).all() and not noised["queries"].content[1].any()
    copies = points[0].view(20, 2, 6, 2)
    torch.testing.assert_close(copies[:, :, 0], targets[0]["boxes_cxcywh"][:, :2].expand(20, 2, 2))
    labeled, areas = targets[0]["keypoints"], targets[0]["areas"]
    distances = (copies[:, :, 1:] * torch.tensor([WIDTH, HEIGHT]) - labeled[..., :2]) * (labeled[..., 2:] > 0)
    assert (copies[:, 0, 3] < 0.002).all()  # not labeled: at the corner
    # Moves in the width and height are relative to the longer side.
    distances[..., 1] *= WIDTH / HEIGHT
    similarity = torch.exp(-distances.square().sum(-1) / (2 * areas[:, None] * 0.1**2))[..., labeled[..., 2] > 0]
    assert (similarity[0::2] > 0.49).all() and (similarity[1::2] < 0.51).all() and (similarity > 0.09).all()
    directions = torch.atan2(*distances[..., labeled[..., 2] > 0, :].unbind(-1))
    assert directions.min() < -2 and directions.max() > 2, "all directions occur"


def test_published_noise_moves_all_keypoints_to_the_lower_right_and_takes_boxes_for_corners():
    model = build(training_queries=[dict(type="KeypointDenoising", published_noise=True)]).train()
    _, targets = batch([2, 1, 0, 2, 0])
    torch.manual_seed(0)
    points = model.training_queries.denoising(model.head, targets, None)[0]["queries"].references[0]
    cx, cy, width, height = targets[0]["boxes_cxcywh"][0]
    expected = torch.stack(((cx + width) / 2, (cy + height) / 2))
    torch.testing.assert_close(points[:, 0], expected.expand(len(points), 2))
    labeled = targets[0]["keypoints"][0, [0, 1, 3], :2] / torch.tensor([WIDTH, HEIGHT])
    moves = points[:, [1, 2, 4]] - labeled
    assert (moves >= -0.002).all() and moves.median() > 0.05


def test_labels_are_replaced_by_those_of_other_classes():
    model = build(training_queries=[dict(type="KeypointDenoising", noise_labels=80)])
    denoising, (_, targets) = model.training_queries.denoising, batch([2, 1, 0, 2, 0])
    denoising.draw = lambda count, device: KeypointNoise(
        torch.tensor([0.2, 0.3] * (count // 2)),
        torch.full((count,), 79),
        torch.ones(count, 6, 2),
        torch.zeros(count, 6),
    )
    content = denoising(model.head, targets, None)[0]["queries"].content[0, :, 0]
    assert torch.equal(content[:2], denoising.label_embed.weight[[79, 0]])


def test_positions_stay_only_if_told_to():
    pixels, _ = batch()
    outputs = []
    for keeps in (True, False):
        spec = copy.deepcopy(DENSE["ECPose"][0])
        model = build(head=dict(spec["head"], keeps_positions=keeps)).eval()
        for name, parameter in model.head.named_parameters():
            if "shift_embed" in name or "keypoint_embed.layers.2" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        with torch.no_grad():
            outputs.append(model(pixels)["pred_keypoints"])
    assert not torch.allclose(*outputs, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_keypoints=0), "num_keypoints=0, num_decoder_layers=2: expected at least 1"),
        (dict(keypoint_sigmas=[0.1]), r"keypoint_sigmas=\[0\.1\]: expected 5 numbers above 0"),
        (dict(training_queries=["BoxDenoising"]), "BoxDenoising needs queries that start from boxes"),
        (dict(training_queries=[dict(type="QueryGroups", groups=2)]), "QueryGroups"),
        (
            dict(training_queries=[dict(type="KeypointDenoising", label_noise=3.0)]),
            r"label_noise=3\.0: expected 0 to 2",
        ),
        (
            dict(training_queries=[dict(type="KeypointDenoising", noise_labels=0)]),
            "noise_labels=0: expected at least 1",
        ),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(**changes)


def test_half_precision_predicts_with_keypoints_in_float32():
    model, (images, _) = build(training_queries=[]).eval(), batch()
    images = images.float() / 64 - 2
    with torch.no_grad():
        whole, half = model(images), copy.deepcopy(model).half()(images.half())
    assert half["pred_logits"].dtype == torch.float16 and half["pred_keypoints"].dtype == torch.float32
    torch.testing.assert_close(half["pred_logits"].float(), whole["pred_logits"], atol=0.05, rtol=0.1)
    assert half["pred_keypoints"].isfinite().all()  # with initial weights, rounding changes which locations are chosen


def test_denoising_of_keypoints_needs_a_head_with_keypoints():
    head = DINOHead({"res5": FeatureInfo(16, 32)}, 3, num_queries=2, d_model=16, num_heads=2, num_decoder_layers=1)
    with pytest.raises(ConfigError, match="unlike those of this DINOHead. Choose model.head.type=DETRPoseHead"):
        TRAINING_QUERIES.build("KeypointDenoising", head=head, num_classes=3)
    assert DETRPoseHead.reference == "keypoints"


class Killed(Hook):
    def after_step(self, run, step):
        if run.progress.step == 13:
            raise ZeroDivisionError


CONFIG = """
from vitkit.configs.ecpose import config as ecpose
from vitkit.configs.quickstart.keypoints import config as keypoints


def config():
    cfg = keypoints()
    cfg["criterion"] = ecpose()["criterion"]
    cfg["model"] = dict(
        type="ECPose", num_queries=10, num_detections=10, num_keypoints=4,
        backbone=dict(type="ECViT", d_model=32, depth=2, num_heads=2, pretrained=False),
        neck=dict(type="DEIMv2Encoder", out_channels=32, num_heads=2, d_ffn=48, num_blocks=1, activation="silu"),
        head=dict(type="DETRPoseHead", d_model=32, num_heads=2, d_ffn=48, num_decoder_layers=2),
        training_queries=[dict(type="KeypointDenoising")],
    )
    cfg["evaluator"]["iou_types"] = ["keypoints"]
    return cfg
"""


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
    file = folder.parent / "poses.py"
    file.write_text(CONFIG, encoding="utf-8")
    vitkit.train(str(file), run_dir=folder, device="cpu", hooks=hooks, **changes)


def test_a_run_on_drawn_shapes_learns_and_a_killed_one_continues_bit_for_bit(tmp_path):
    train(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "parts", hooks=[Killed()])
    vitkit.train(resume=tmp_path / "parts", device="cpu")
    one, other = (read_checkpoint(tmp_path / name / "last.pth") for name in ("whole", "parts"))
    assert one["model"].keys() == other["model"].keys() and one["keypoints"]["names"] == other["keypoints"]["names"]
    assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())
    losses = losses_of(tmp_path / "whole")
    assert sum(step["loss"] for step in losses[-4:]) < 0.85 * sum(step["loss"] for step in losses[:4])
    assert losses[-1]["losses"]["keypoint_l1"] < losses[0]["losses"]["keypoint_l1"]
    assert losses == losses_of(tmp_path / "parts")


def losses_of(folder):
    records = map(json.loads, (folder / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [{name: r[name] for name in ("step", "loss", "losses")} for r in records if r["kind"] == "train"]
