"""DINO, and denoising for all DETRs; test_dino_golden.py compares with the original."""

from pathlib import Path

import pytest
import torch
from helpers.detection_batches import small_batch
from helpers.detection_specs import deformable_detr_spec, detr_spec
from helpers.processes import on_ranks
from torch.nn.parallel import DistributedDataParallel

from vitkit.config import load_config
from vitkit.distributed import rank
from vitkit.engine.build import build_model
from vitkit.engine.step import training_inputs
from vitkit.errors import CheckpointError, ConfigError
from vitkit.io.coco_classes import COCO_CATEGORY_IDS, COCO_CLASSES
from vitkit.registry import CRITERIA
from vitkit.structures import Batch
from vitkit.weights import load_weights

DENOISING = dict(type="BoxDenoising", num_queries=6)
SMALL = dict(
    d_model=32, num_heads=4, num_points=2, d_ffn=64, dropout=0.0, num_encoder_layers=1, num_decoder_layers=3
)  # fmt: skip
DINO = dict(type="DINOHead", **SMALL)
HEADS = {
    "dino": DINO,
    "two_stage": dict(type="DeformableDETRHead", refine_boxes=True, two_stage=True, **SMALL),
    "anchor_boxes": dict(type="DABDeformableDETRHead", **SMALL),
    "detr": {},
}
"""Variant -> its head; DETR's is that of its spec."""
TARGETS = [
    dict(labels=torch.tensor([0, 2]), boxes_cxcywh=torch.tensor([[0.3, 0.3, 0.2, 0.4], [0.7, 0.5, 0.3, 0.3]])),
    dict(labels=torch.zeros(0, dtype=torch.int64), boxes_cxcywh=torch.zeros(0, 4)),
]
EMPTY = [TARGETS[1], TARGETS[1]]


def make_spec(variant, **head):
    """Return the spec of a small model without training queries."""
    if variant == "detr":
        spec = detr_spec()
    else:
        spec = deformable_detr_spec() | dict(head=HEADS[variant] | head)
        spec["type"] = "DINO" if variant == "dino" else "DeformableDETR"
    spec["backbone"] = dict(type="ResNet", depth=18, out_features=["res3", "res4"], norm="frozen_bn", pretrained=False)
    return spec


def make_model(variant, training_queries=None, **head):
    """Build a small model; its denoising is contrastive for the detectors in two stages, unless others are given."""
    torch.manual_seed(0)
    if training_queries is None:
        training_queries = [DENOISING | dict(contrastive=variant in ("dino", "two_stage"))]
    return build_model(make_spec(variant, **head) | dict(training_queries=training_queries))


def make_criterion(variant):
    name = "detr_r50" if variant == "detr" else "dino_r50_4scale"
    return CRITERIA.build(load_config(name)["criterion"])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("variant", HEADS)
def test_loss_keys_are_constant_and_every_parameter_has_a_gradient_with_any_targets(variant, autocast):
    model, criterion = make_model(variant), make_criterion(variant)
    assert model.uses_targets
    keys = []
    for targets in (TARGETS, EMPTY):
        model.zero_grad()
        inputs = training_inputs(model, Batch(dict(zip(("images", "padding_mask"), small_batch())), targets))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = criterion(model(**inputs), targets)
        keys.append(losses.keys())
        sum(losses.values()).backward()
        missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert missing == []
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        noised = sum(value for name, value in losses.items() if name.startswith("dn_"))
        assert noised > 0 if targets is TARGETS else noised == 0
    layers = ["", "aux0_", "aux1_", "dn_", "dn_aux0_", "dn_aux1_"]
    layers += ["enc_"] if variant in ("dino", "two_stage") else []
    assert keys[0] == keys[1] == {f"{layer}{term}" for layer in layers for term in ("labels", "l1", "giou")}


@pytest.mark.parametrize("variant", HEADS)
def test_denoising_queries_do_not_affect_the_matching_queries(variant):
    model = make_model(variant)
    with torch.no_grad():
        alone, beside = model(*small_batch()), model(*small_batch(), targets=TARGETS)
    rows = 12 if model.training_queries["denoising"].contrastive else 6
    *_, noised = beside["training_outputs"]
    assert len(alone.get("training_outputs", [])) == len(beside["training_outputs"]) - 1
    assert noised["name"] == "dn" and noised["pred_boxes"].shape == (2, rows, 4)
    for name in ("pred_logits", "pred_boxes"):
        torch.testing.assert_close(beside[name], alone[name])
        torch.testing.assert_close(beside["aux_outputs"][0][name], alone["aux_outputs"][0][name])


@pytest.mark.parametrize("variant", HEADS)
def test_a_batch_without_padding_needs_no_mask(variant):
    model = make_model(variant).eval()
    images = small_batch()[0]
    with torch.no_grad():
        outputs, masked = model(images), model(images, torch.zeros(len(images), *images.shape[-2:], dtype=torch.bool))
    for name in ("pred_logits", "pred_boxes"):
        torch.testing.assert_close(outputs[name], masked[name], atol=1e-5, rtol=1e-5)


def test_only_images_of_incomplete_locations_differ_if_padding_is_not_rounded():
    exact, rounded = (make_model("dino", [], rounds_padding=value).eval() for value in (False, True))
    rounded.load_state_dict(exact.state_dict())
    for size, is_same in (((64, 96), True), ((70, 90), False)):
        images = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            boxes, masked, of_rounded = (
                model(images, mask)["pred_boxes"]
                for model, mask in ((exact, None), (exact, torch.zeros(1, *size, dtype=torch.bool)), (rounded, None))
            )
        torch.testing.assert_close(boxes, masked)
        assert torch.allclose(boxes, of_rounded, atol=1e-5) == is_same


def test_denoising_groups_do_not_attend_to_each_other():
    model = make_model("dino")
    denoising = model.training_queries["denoising"]

    outputs = []
    for first_changed in (12, 6):  # of six copies of two targets
        torch.manual_seed(0)
        noise = type(denoising).draw(denoising, 12, torch.device("cpu"))
        noise.shares[first_changed:] = 0.9
        denoising.draw = lambda count, device, noise=noise: noise
        with torch.no_grad():
            outputs.append(model(*small_batch(), targets=TARGETS)["training_outputs"][-1]["pred_logits"])
    rows = outputs[0].shape[1]
    assert rows == 12  # three groups of four rows
    torch.testing.assert_close(outputs[0][:, :4], outputs[1][:, :4])
    assert (outputs[0][0, 8:] - outputs[1][0, 8:]).abs().max() > 1e-4


def test_look_forward_twice_trains_the_box_head_of_the_previous_layer():
    for look_forward_twice in (False, True):
        model = make_model("dino", look_forward_twice=look_forward_twice, share_heads=False)
        outputs = model(*small_batch())
        outputs["pred_boxes"].sum().backward()
        grads = [head.layers[-1].bias.grad for head in model.head.decoder.bbox_embed]
        trained = [grad is not None and bool(grad.abs().sum() > 0) for grad in grads]
        assert trained == [False, look_forward_twice, True]


def test_only_the_locations_selected_by_their_best_class_have_a_loss():
    model = make_model("dino").eval()
    with torch.no_grad():
        outputs = model(*small_batch())
        (selection,) = outputs["training_outputs"]
        best = selection["pred_logits"].amax(-1)
        assert best.shape == (2, 10) and "class_agnostic" not in selection
        assert (best.diff(dim=1) <= 1e-6).all()
        torch.testing.assert_close(outputs["aux_outputs"][0]["reference_points"], selection["pred_boxes"])


def test_the_number_of_detections_is_set_by_the_config():
    outputs = dict(pred_logits=torch.rand(1, 10, 3), pred_boxes=torch.rand(1, 10, 4))
    spec = make_spec("dino") | dict(num_detections=7)
    assert len(build_model(spec).postprocess(outputs, [(10, 10)])[0]["scores"]) == 7
    with pytest.raises(ConfigError, match="num_detections=0: expected at least 1"):
        build_model(deformable_detr_spec(num_detections=0))


def test_duplicates_come_last_without_a_score():
    boxes = torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.5, 0.5, 0.2, 0.21], [0.2, 0.2, 0.2, 0.2]])
    logits = torch.tensor([[3.0, -4.0], [2.0, -3.0], [1.0, -5.0]])
    outputs = dict(pred_logits=logits[None], pred_boxes=boxes[None])
    spec = make_spec("dino") | dict(num_detections=4, num_classes=2)
    plain = build_model(spec).postprocess(outputs, [(10, 10)])[0]
    assert plain["labels"].tolist() == [0, 0, 0, 1]
    result = build_model(spec | dict(nms_iou=0.8)).postprocess(outputs, [(10, 10)])[0]
    torch.testing.assert_close(result["scores"], torch.tensor([3.0, 1.0, -3.0, -torch.inf]).sigmoid())
    torch.testing.assert_close(result["boxes_xyxy"][1], torch.tensor([1.0, 1.0, 3.0, 3.0]))
    with pytest.raises(ConfigError, match="nms_iou=1.5: expected a number between 0 and 1"):
        build_model(spec | dict(nms_iou=1.5))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (dict(), "BoxDenoising needs queries that start from boxes, unlike those of this DeformableDETRHead"),
        (dict(two_stage=True), "model.head: DeformableDETRHead: two_stage=True needs refine_boxes=True"),
    ],
)
def test_mutually_exclusive_options_are_named(head, message):
    with pytest.raises(ConfigError, match=message):
        make_model("two_stage", **(dict(refine_boxes=False, two_stage=False) | head))


def test_dino_and_deformable_detr_checkpoints_are_distinguished():
    dino, two_stage = make_model("dino"), make_model("two_stage", [])
    mixed = "of 3 levels in two stages with mixed query selection \\(DINO\\)"
    with pytest.raises(CheckpointError, match=f"DeformableDETR {mixed} does not fit a model of 3 levels in two stages"):
        load_weights(two_stage, dino.state_dict())
    with pytest.raises(CheckpointError, match=f"DINO of 3 levels in two stages does not fit a model {mixed}"):
        load_weights(dino, two_stage.state_dict())


def test_weights_of_detr_are_not_taken_for_a_variant_of_deformable_detr():
    with pytest.raises(CheckpointError, match="That is another model's checkpoint"):
        load_weights(make_model("dino"), make_model("detr").state_dict())


def test_no_strictness_helps_against_wrong_shapes():
    state = make_model("dino").state_dict()
    state["head.decoder.layers.0.norm1.weight"] = torch.ones(7)
    with pytest.raises(CheckpointError, match="norm1.weight: checkpoint \\(7,\\)") as error:
        load_weights(make_model("dino"), state)
    assert "strict=False" not in str(error.value)


def official_state(num_classes=91):
    """Return the small model's state dict under the original's names, with COCO's raw ids as classes."""
    spec = make_spec("dino") | dict(num_classes=num_classes, training_queries=[DENOISING])
    state = {}
    for key, value in build_model(spec).state_dict().items():
        for ours, theirs in (
            ("backbone.", "backbone.0.body."),
            ("neck.levels.", "input_proj."),
            ("head.proposals.content.", "transformer.tgt_embed."),
            ("head.proposals.enc_output", "transformer.enc_output"),
            ("head.proposals.", "transformer.enc_out_"),
            ("training_queries.denoising.label_embed.", "label_enc."),
            ("head.class_embed.", "transformer.decoder.class_embed."),
            ("head.", "transformer."),
        ):
            if key.startswith(ours):
                key = theirs + key.removeprefix(ours)
                break
        state[key.replace(".ffn.", ".")] = value
    for key in [key for key in state if "decoder.class_embed.0" in key or "decoder.bbox_embed.0" in key]:
        for layer in range(3):
            name = key.replace("embed.0", f"embed.{layer}")
            state[name] = state[name.removeprefix("transformer.decoder.")] = state[key]
    return state


def test_official_names_load_with_the_rows_of_the_coco_classes():
    state = official_state()
    spec = make_spec("dino") | dict(num_classes=80, training_queries=[DENOISING])
    model = build_model(spec)
    report = load_weights(model, {"model": state}, classes=COCO_CLASSES)
    assert report.converter == "IDEA-Research/DINO" and not (report.missing or report.unexpected)
    ids = list(COCO_CATEGORY_IDS)
    head = model.head
    assert torch.equal(head.class_embed[0].weight, state["class_embed.2.weight"][ids])
    # A first stage that ranks by the most probable class treats all classes alike.
    assert torch.equal(head.proposals.class_embed.weight, state["transformer.enc_out_class_embed.weight"][ids])
    assert torch.equal(model.training_queries.denoising.label_embed.weight, state["label_enc.weight"][[*ids, 91]])


def test_other_classes_reinitialize_the_label_embedding_and_the_class_heads():
    spec = make_spec("dino") | dict(training_queries=[DENOISING])
    trained, model = build_model(spec), build_model(spec | dict(num_classes=5))
    report = load_weights(model, trained.state_dict(), new_class_head=True)
    assert "training_queries.denoising.label_embed.weight" in report.reinitialized and not (
        report.missing or report.unexpected
    )
    assert torch.equal(model.head.proposals.content.weight, trained.head.proposals.content.weight)


@pytest.mark.parametrize("variant", HEADS)
def test_weights_with_and_without_denoising_are_interchangeable(variant, caplog):
    caplog.set_level("INFO", "vitkit")
    with_denoising, without = make_model(variant), make_model(variant, [])
    extra = with_denoising.state_dict().keys() - without.state_dict().keys()
    assert extra and all(key.startswith("training_queries.denoising.") for key in extra)
    assert not without.uses_targets
    torch.nn.init.zeros_(
        with_denoising.head.level_embed if variant != "detr" else with_denoising.head.query_embed.weight
    )
    for start, model in ((with_denoising, without), (without, with_denoising)):
        report = load_weights(model, start.state_dict())
        assert not (report.missing or report.unexpected)
    assert "training_queries.denoising is used only in training, and is not in the weights" in caplog.text
    loaded = without.state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in with_denoising.state_dict().items() if key in loaded)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # A projection of res2, and of each of 12 attentions 8 heads * 4 points on one level more: (2 + 1) * 32 rows.
        ("r50_5scale", 46_893_182 + (256 * 256 + 3 * 256) + 12 * 96 * 257 + 256),
        # Swin-T's published backbone without the norm of res2, in place of ResNet's, and other widths for the neck.
        ("swin_large_4scale", 217_230_066),
        ("swin_tiny_4scale", 46_893_182 - 23_454_912 + 27_520_698 - 2 * 96 - 256 * (3584 - 1344 + 9 * (2048 - 768))),
    ],
)
def test_other_configs_have_the_expected_parameter_counts(name, expected):
    with torch.device("meta"):
        model = build_model(load_config(f"configs/dino_{name}.py")["model"])
    assert sum(p.numel() for p in model.parameters()) == expected


def train_one_step(folder: Path) -> tuple:
    """Train one step with DDP, where the second rank's images have no objects."""
    model = DistributedDataParallel(make_model("dino"))
    targets = [TARGETS, EMPTY][rank()]
    losses = make_criterion("dino")(model(*small_batch(), targets=targets), targets)
    sum(losses.values()).backward()
    noised = sum(value for name, value in losses.items() if name.startswith("dn_"))
    grad = model.module.training_queries.denoising.label_embed.weight.grad
    return sorted(losses), float(noised), grad


def test_rank_without_objects_trains_alongside_one_with_objects(tmp_path):
    first, second = on_ranks(2, tmp_path, train_one_step)
    assert first[0] == second[0]
    assert first[1] > 0 and second[1] == 0
    assert torch.equal(first[2], second[2]) and first[2].abs().sum() > 0
