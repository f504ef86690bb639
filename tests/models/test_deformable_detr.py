import pytest
import torch
from helpers.detection_batches import small_batch
from helpers.detection_specs import deformable_detr_spec
from helpers.weights import assert_same_weights

from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.io.coco_classes import COCO_CATEGORY_IDS, COCO_CLASSES
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.nn.deformable_transformer import flatten_levels, in_padded_maps
from vitkit.nn.detection import boxes_around
from vitkit.registry import CRITERIA
from vitkit.weights import load_weights

VARIANTS = {"plain": dict(), "refine": dict(refine_boxes=True), "two_stage": dict(refine_boxes=True, two_stage=True)}


def criterion():
    return CRITERIA.build(load_config("deformable_detr_r50")["criterion"])


TARGETS = [
    dict(labels=torch.tensor([0, 2]), boxes_cxcywh=torch.tensor([[0.3, 0.3, 0.2, 0.4], [0.7, 0.5, 0.3, 0.3]])),
    dict(labels=torch.zeros(0, dtype=torch.int64), boxes_cxcywh=torch.zeros(0, 4)),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_have_the_promised_shapes_and_ranges(variant):
    outputs = build_model(deformable_detr_spec(head=VARIANTS[variant]))(*small_batch())
    assert set(outputs) - {"training_outputs"} == {"pred_logits", "pred_boxes", "reference_points", "aux_outputs"}
    for layer in (outputs, *outputs["aux_outputs"]):
        assert layer["pred_logits"].shape == (2, 10, 3)
        assert layer["pred_boxes"].shape == (2, 10, 4)
        assert layer["pred_boxes"].min() >= 0 and layer["pred_boxes"].max() <= 1
    assert len(outputs["aux_outputs"]) == 2
    coordinates = [layer["reference_points"].shape[-1] for layer in (*outputs["aux_outputs"], outputs)]
    assert coordinates == {"plain": [2, 2, 2], "refine": [2, 4, 4], "two_stage": [4, 4, 4]}[variant]
    if variant == "two_stage":
        places = 9 * 12 + 5 * 6 + 3 * 3
        (proposals,) = outputs["training_outputs"]
        assert proposals["pred_logits"].shape == (2, places, 3)
        assert proposals["pred_boxes"].shape == (2, places, 4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_finite_gradient_also_without_objects(variant):
    model = build_model(deformable_detr_spec(head=VARIANTS[variant]))
    for targets in (TARGETS, [TARGETS[1], TARGETS[1]]):
        model.zero_grad()
        losses = criterion()(model(*small_batch()), targets)
        assert ("enc_labels" in losses) == (variant == "two_stage")
        sum(losses.values()).backward()
        bad = [n for n, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
        assert not bad


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_image_that_is_all_padding_gives_no_nan(variant):
    images, mask = small_batch()
    mask[1] = True
    model = build_model(deformable_detr_spec(head=VARIANTS[variant]))
    losses = criterion()(model(images, mask), TARGETS)
    sum(losses.values()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_isolated_images_do_not_depend_on_padding(variant):
    model = build_model(deformable_detr_spec(head=VARIANTS[variant], isolate_padding=True)).eval()
    for head in [*model.head.decoder.bbox_embed, *model.head.class_embed]:
        torch.nn.init.normal_(head.weight if hasattr(head, "weight") else head.layers[-1].weight, std=0.1)
    image = torch.randint(0, 256, (1, 3, 69, 51), dtype=torch.uint8)
    with torch.no_grad():
        alone = model(image, torch.zeros(1, 69, 51, dtype=torch.bool))
        for height, width in ((69, 60), (101, 83)):
            images, mask = torch.zeros(2, 3, height, width, dtype=torch.uint8), torch.ones(2, height, width).bool()
            images[0, :, :69, :51], mask[0, :69, :51] = image[0], False
            images[1], mask[1] = 77, False
            outputs = model(images, mask)
            for name in ("pred_logits", "pred_boxes"):
                torch.testing.assert_close(outputs[name][:1], alone[name], atol=1e-4, rtol=1e-4)


def test_postprocess_selects_the_best_query_class_pairs():
    model = build_model(deformable_detr_spec())
    logits = torch.tensor([[[2.0, 1.5, -5.0], [-5.0, 3.0, -5.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4], [0.25, 0.5, 0.5, 1.0]]])
    (detections,) = model.postprocess(dict(pred_logits=logits, pred_boxes=boxes), [(100, 200)])
    assert detections["labels"].tolist()[:3] == [1, 0, 1] and len(detections["labels"]) == 6
    torch.testing.assert_close(detections["scores"][:3], torch.tensor([3.0, 2.0, 1.5]).sigmoid())
    expected = torch.tensor([[0.0, 0.0, 100.0, 100.0], [80.0, 30.0, 120.0, 70.0], [80.0, 30.0, 120.0, 70.0]])
    torch.testing.assert_close(detections["boxes_xyxy"][:3], expected)


def test_initial_boxes_surround_their_reference_points():
    model = build_model(deformable_detr_spec())
    outputs = model(*small_batch())
    torch.testing.assert_close(outputs["pred_boxes"][..., :2], outputs["reference_points"])
    size = torch.tensor(-2.0).sigmoid()
    torch.testing.assert_close(outputs["pred_boxes"][..., 2:], size.expand(2, 10, 2))
    # The class logits start at the prior of 0.01.
    assert model.head.class_embed[0].bias.sigmoid().tolist() == pytest.approx([0.01] * 3)
    boxes = torch.tensor([[0.5, 0.25, 0.1, 0.2]])
    torch.testing.assert_close(boxes_around(boxes, torch.zeros(1, 4)), boxes)
    moved = boxes_around(torch.tensor([[0.5, 0.25]]), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(moved, torch.tensor([[torch.tensor(1.0).sigmoid(), 0.25, 0.5, 0.5]]))


def test_locations_are_relative_to_the_image_without_its_padding():
    mask = torch.ones(1, 8, 8, dtype=torch.bool)
    mask[:, :4, :2] = False
    maps = {"a": torch.zeros(1, 4, 4, 4), "b": torch.zeros(1, 4, 2, 2)}
    levels = flatten_levels(maps, torch.zeros(2, 4), mask, position_offset=-0.5)
    torch.testing.assert_close(levels.valid_ratios, torch.tensor([[[0.25, 0.5], [0.5, 0.5]]]))
    assert levels.sizes() == [16, 4] and levels.padding_mask[0].sum() == 14 + 3
    centers = levels.centers()
    torch.testing.assert_close(centers[0, 0], torch.tensor([0.5, 0.25]))  # first of a 2 x 1 (h x w) image
    torch.testing.assert_close(centers[0, 4], torch.tensor([0.5, 0.75]))
    torch.testing.assert_close(centers[0, 16], torch.tensor([0.5, 0.5]))
    in_maps = in_padded_maps(centers[:, :1], levels.valid_ratios)
    torch.testing.assert_close(in_maps, torch.tensor([[[[0.125, 0.125], [0.25, 0.125]]]]))
    boxes = in_padded_maps(torch.tensor([[[0.5, 0.5, 1.0, 1.0]]]), levels.valid_ratios)
    torch.testing.assert_close(boxes[0, 0, 0], torch.tensor([0.125, 0.25, 0.25, 0.5]))


def test_locations_are_relative_to_the_pixels_of_the_image_if_strides_are_given():
    mask = torch.ones(2, 12, 16, dtype=torch.bool)
    mask[0, :10, :13], mask[1] = False, False
    maps = {"a": torch.zeros(2, 4, 3, 4), "b": torch.zeros(2, 4, 2, 2)}
    levels = flatten_levels(maps, None, mask, strides=[4, 8])
    expected = [[[13 / 16, 10 / 12], [13 / 16, 10 / 16]], [[1, 1], [1, 12 / 16]]]
    torch.testing.assert_close(levels.valid_ratios, torch.tensor(expected))
    for image, (width, height) in enumerate([(13, 10), (16, 12)]):
        pixels = levels.centers()[image] * torch.tensor([width, height])
        torch.testing.assert_close(pixels[[0, 5, 12, 15]], torch.tensor([[2.0, 2], [6, 6], [4, 4], [12, 12]]))
    corner = in_padded_maps(torch.ones(2, 1, 2), levels.valid_ratios)[0, 0]
    torch.testing.assert_close(
        corner * torch.tensor([[4.0, 3], [2, 2]]), torch.tensor([13.0, 10]) / torch.tensor([[4.0], [8]])
    )


def test_activation_checkpointing_gives_the_same_gradients():
    def gradients(checkpointing):
        torch.manual_seed(1)
        model = build_model(deformable_detr_spec(head=VARIANTS["two_stage"]))
        model.backbone.eval().requires_grad_(False)
        if checkpointing:
            enable_activation_checkpointing(model)
        sum(criterion()(model(*small_batch()), TARGETS).values()).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for a, b in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(a, b)


def test_mixed_precision_stays_close_and_boxes_are_float32():
    model = build_model(deformable_detr_spec(head=VARIANTS["refine"])).eval()
    expected = model(*small_batch())
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(*small_batch())
    assert outputs["pred_boxes"].dtype == torch.float32
    torch.testing.assert_close(outputs["pred_boxes"], expected["pred_boxes"], atol=0.02, rtol=0.05)


@pytest.mark.parametrize(
    "name", ["r50", "r50_refine", "r50_two_stage", "r50_single_scale", "r50_single_scale_dc5", "swin_tiny"]
)
def test_each_config_builds_and_names_its_parameter_groups(name):
    from vitkit.registry import OPTIMIZERS

    cfg = load_config(f"deformable_detr_{name}")
    with torch.device("meta"):
        model = build_model(cfg["model"], classes=[f"class {i}" for i in range(80)])
    optimizer = OPTIMIZERS.build(cfg["optimizer"], model=model)
    assert sorted({round(group["lr"], 8) for group in optimizer.param_groups}) == [2e-5, 2e-4]
    CRITERIA.build(cfg["criterion"])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("r50_single_scale", 34_066_593), ("r50", 40_069_665), ("r50_refine", 40_849_660), ("r50_two_stage", 41_181_529)],
)
def test_parameter_counts_equal_the_originals(name, parameters):
    with torch.device("meta"):
        model = build_model({**load_config(f"deformable_detr_{name}")["model"], "num_classes": 91})
    assert sum(p.numel() for p in model.parameters()) == parameters


def official(model):
    """Return the model's weights under the official names, with the second names that the original stores."""
    state = {}
    two_stage = hasattr(model.head, "proposals")
    layers = len(model.head.decoder.layers)
    for key, value in model.state_dict().items():
        key = key.replace("backbone.", "backbone.0.body.").replace("neck.levels.", "input_proj.")
        key = key.replace(".ffn.linear", ".linear")
        key = key.replace("head.proposals.class_embed.", f"class_embed.{layers}.")
        key = key.replace("head.proposals.bbox_embed.", f"bbox_embed.{layers}.")
        key = key.replace("head.proposals.", "transformer.").replace("head.decoder.bbox_embed.", "bbox_embed.")
        key = key.replace("head.class_embed.", "class_embed.").replace("head.query_embed.", "query_embed.")
        state[key.replace("head.", "transformer.")] = value.clone()
    for key in list(state):
        if model.head.decoder.refine_boxes and key.startswith("bbox_embed."):
            state[f"transformer.decoder.{key}"] = state[key]
        if two_stage and key.startswith("class_embed."):
            state[f"transformer.decoder.{key}"] = state[key]
        if not model.head.decoder.refine_boxes and key.startswith(("class_embed.0.", "bbox_embed.0.")):
            for i in range(1, layers):
                state[key.replace("embed.0.", f"embed.{i}.")] = state[key]
    return state


@pytest.mark.parametrize("variant", VARIANTS)
def test_official_weights_of_every_variant_load(variant):
    torch.manual_seed(0)
    theirs, ours = (build_model(deformable_detr_spec(head=VARIANTS[variant])) for _ in range(2))
    report = load_weights(ours, {"model": official(theirs)})
    assert report.converter == "fundamentalvision/Deformable-DETR" and not report.missing and not report.unexpected
    assert_same_weights(ours, theirs)


def test_error_for_official_weights_of_another_variant_names_it():
    def model(levels=3, **head):
        return build_model(deformable_detr_spec(num_levels=levels, head=head))

    cases = [
        (VARIANTS["two_stage"], {}, 3, "of 3 levels in two stages does not fit a model of 3 levels without box"),
        (VARIANTS["refine"], {}, 3, "with box refinement does not fit a model of 3 levels without box refinement"),
        ({}, VARIANTS["refine"], 3, "without box refinement does not fit a model of 3 levels with box refinement"),
        ({}, {}, 2, "of 2 levels without box refinement does not fit a model of 3 levels"),
    ]
    for theirs, ours, levels, message in cases:
        with pytest.raises(CheckpointError, match=message):
            load_weights(model(**ours), official(model(levels, **theirs)))


def test_error_for_own_weights_of_another_variant_names_it():
    plain, refine = (build_model(deformable_detr_spec(head=VARIANTS[name])) for name in ("plain", "refine"))
    with pytest.raises(CheckpointError, match="with box refinement does not fit a model of 3 levels without box ref"):
        load_weights(plain, refine.state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_for_91_raw_ids_are_used_for_the_80_classes(variant):
    torch.manual_seed(0)
    spec = deformable_detr_spec(num_queries=12, head=VARIANTS[variant])
    theirs, ours = (build_model({**spec, "num_classes": n}).eval() for n in (91, 80))
    for head in theirs.modules():
        if isinstance(head, torch.nn.Linear) and head.out_features == 91:
            torch.nn.init.normal_(head.weight)
    report = load_weights(ours, official(theirs), classes=COCO_CLASSES)
    assert not report.reinitialized
    images, mask = small_batch()
    with torch.no_grad():
        expected, outputs = theirs(images, mask), ours(images, mask)
    # The same locations are proposed, so that queries agree one by one.
    torch.testing.assert_close(outputs["pred_boxes"], expected["pred_boxes"])
    torch.testing.assert_close(outputs["pred_logits"], expected["pred_logits"][..., list(COCO_CATEGORY_IDS)])


def test_official_weights_with_other_classes_are_not_taken_for_coco():
    theirs = build_model(deformable_detr_spec())
    report = load_weights(build_model(deformable_detr_spec()), official(theirs), classes=["a", "b", "c"])
    assert report.converter and not report.reinitialized


def test_other_classes_reinitialize_only_the_class_heads():
    torch.manual_seed(0)
    theirs = build_model(deformable_detr_spec(head=VARIANTS["two_stage"]))
    ours = build_model({**deformable_detr_spec(head=VARIANTS["two_stage"]), "num_classes": 5})
    report = load_weights(ours, official(theirs), classes=list("abcde"), new_class_head=True)
    names = {key.rsplit(".", 1)[0] for key in report.reinitialized}
    assert names == {*(f"head.class_embed.{i}" for i in range(3)), "head.proposals.class_embed"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (deformable_detr_spec(head=dict(two_stage=True)), "two_stage=True needs refine_boxes=True"),
        (deformable_detr_spec(num_queries=0), "num_queries=0, expected at least 1"),
        (
            {**deformable_detr_spec(), "neck": dict(type="PyramidProjection", out_channels=64)},
            "feature 'res3' has 64 channels",
        ),
        (
            {**deformable_detr_spec(), "backbone": dict(type="ResNet", depth=18, out_features=["res3", "res7"])},
            "unknown feature",
        ),
    ],
)
def test_wrong_settings_are_named(spec, message):
    with pytest.raises(ConfigError, match=message):
        build_model(spec)


def test_too_small_images_are_named():
    images = torch.zeros(1, 3, 20, 31, dtype=torch.uint8)
    with pytest.raises(DataError, match="images of 20x31 pixels are smaller than one location of the coarsest map"):
        build_model(deformable_detr_spec())(images)
    with pytest.raises(DataError, match=r"11 locations, fewer than the 12 queries.*model\.num_queries"):
        build_model(deformable_detr_spec(num_queries=12, head=VARIANTS["two_stage"]))(
            torch.zeros(1, 3, 16, 32, dtype=torch.uint8)
        )
