"""EoMT with the golden weights against the official code; the tolerances are in the JSON."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from golden.weights import compare, grad_projection, load_case, rng_for
from helpers.undrawn_models import undrawn

from vitkit.engine.build import build_model
from vitkit.engine.optimizers import adamw
from vitkit.model_zoo.converters import convert_official
from vitkit.models.eomt import MaskAnnealing
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.ops.mask_postprocess import Geometry, PanopticRules, panoptic, upsample
from vitkit.ops.masks import mask_logits
from vitkit.registry import CRITERIA, SCHEDULES
from vitkit.weights import load_weights

NAMES = ["", "block_-3_", "block_-2_", "block_-1_"]
"""Golden prefixes of the predictions in our order: the last, then the earlier ones."""
POINTS = {"candidates": "loss_over", "uniform": "loss_rand"}


@pytest.fixture(scope="module")
def case():
    return load_case("eomt_small_640_coco_panoptic")


@pytest.fixture(scope="module")
def model(case):
    with undrawn():
        model = build_model(
            dict(
                type="EoMT",
                num_queries=200,
                num_blocks=3,
                num_classes=133,
                tasks=["panoptic"],
                backbone=dict(type="vit_small_patch14_reg4_dinov2", patch_size=16, image_size=[96, 128]),
            )
        ).eval()
    report = load_weights(model, case.torch_state_dict())
    assert report.converter == "tue-mps/eomt"
    return model


@pytest.fixture(scope="module")
def images(case):
    return torch.stack([case.torch_inputs()[name] for name in ("image0", "image1")]).to(torch.uint8)


@pytest.fixture(scope="module")
def outputs(model, images):
    return model(images)


def named(outputs, prefix=""):
    """The outputs under the golden file's names."""
    layers = dict(zip(NAMES, [outputs, *outputs["aux_outputs"]]))
    values = {f"{prefix}{name}pred_logits": layer["pred_logits"] for name, layer in layers.items()}
    masks = {name: mask_logits(layer["mask_embed"], layer["mask_features"]) for name, layer in layers.items()}
    return values | {f"{prefix}{name}pred_masks": value for name, value in masks.items()}


def assert_golden(case, values):
    report = compare(case, {name: value.detach().numpy() for name, value in values.items()})
    assert report.keys() == values.keys() and all(line["ok"] for line in report.values()), report


def set_tasks(model, task):
    """Let an EoMT of 133 classes return the results of a task."""
    thresholds = dict(num_instances=100, object_threshold=0.8, overlap_threshold=0.8)
    model.set_results(133, tasks=[task], things=None, **thresholds)


def test_every_prediction_equals_the_original(case, model, outputs):
    assert sum(p.numel() for p in model.parameters()) == 23_379_974
    assert len(outputs["aux_outputs"]) == 3
    assert_golden(case, named(outputs))
    torch.testing.assert_close(outputs["pred_masks"], mask_logits(outputs["mask_embed"], outputs["mask_features"]))


def test_pixels_may_come_normalized(case, model, images):
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    with torch.no_grad():
        outputs = model((images / 255 - mean) / std)
    assert_golden(case, named(outputs))


def test_half_annealed_and_unmasked_equal_the_original(case, model, images, monkeypatch):
    def draw(block, shape, device):
        numbers = rng_for(f"annealing:{case.name}:block_{block - 3}").random(shape, dtype="float32")
        return torch.from_numpy(numbers).to(device)

    monkeypatch.setattr(model, "draw", draw)
    before = model.attn_mask_probs.tolist()
    try:
        with torch.no_grad():
            model.set_mask_probabilities([0.5] * 3)
            assert_golden(case, named(model(images), "half/"))
            model.set_mask_probabilities([0.0] * 3)
            outputs = model(images)
    finally:
        model.set_mask_probabilities(before)
    assert outputs["aux_outputs"] == []  # a plain ViT's inference
    assert_golden(case, named(outputs, "off/"))


def make_criterion(case, variant):
    """Build the configs' criterion with the golden file's points in place of random ones."""
    criterion = CRITERIA.build(
        dict(
            type="MaskCriterion",
            weights=dict(labels=2.0, mask=5.0, dice=5.0),
            no_object_weight=0.1,
            matcher=dict(type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0),
        )
    )
    layers = [name.rstrip("_") or "final" for name in NAMES]

    # The points of a layer's masks are drawn in several calls.
    rng_of = cache(lambda name: rng_for(f"points:{case.name}:{variant}:{name}"))

    def draw(rng, shape):
        return torch.from_numpy(rng.random(shape, dtype="float32"))

    criterion.draw_points = lambda purpose, layer, num_masks, count, device: draw(
        rng_of(f"{POINTS[purpose]}:{layers[layer]}"), (num_masks, count, 2)
    ).to(device)
    criterion.matcher.draw_points = lambda layer, image, device: draw(
        rng_for(f"points:{case.name}:{variant}:match:{layers[layer]}:{image}"), (criterion.matcher.num_points, 2)
    ).to(device)
    return criterion


def targets_of(case, variant):
    return [{k: torch.from_numpy(target[k]) for k in ("labels", "masks")} for target in case.targets[variant]]


@pytest.mark.parametrize("variant", ["objects", "one_empty"])
def test_matches_and_every_term_equal_the_original(case, outputs, variant):
    criterion, targets = make_criterion(case, variant), targets_of(case, variant)
    expected = case.losses[variant]
    layers = [outputs, *outputs["aux_outputs"]]
    (matches,) = criterion.matcher([(layers, targets)], input_size=outputs["input_size"])
    for layer, name in zip(matches, NAMES, strict=True):
        got = [[index.tolist() for index in pairs] for pairs in layer]
        assert got == [[list(index) for index in pairs] for pairs in expected["indices"][name.rstrip("_") or "final"]]
    losses = criterion(outputs, targets)
    for i, name in enumerate(NAMES):
        for ours, theirs in {"labels": "loss_cross_entropy", "mask": "loss_mask", "dice": "loss_dice"}.items():
            key = theirs + (f"_{name.rstrip('_')}" if name else "")
            weighted = expected["terms"][key] * expected["weights"][key]
            assert losses[f"aux{i - 1}_{ours}" if i else ours].item() == pytest.approx(weighted, rel=1e-4), key
    assert sum(losses.values()).item() == pytest.approx(expected["total"], rel=1e-4)


def official_names(case, model):
    """Official name of each of our parameters."""
    return {ours: name for name, ours in _renamed(case, model).items()}


def _renamed(case, model):
    state = {name: torch.full((1,), float(i)) for i, name in enumerate(case.state_dict)}
    state = {name: value for name, value in state.items() if "pixel" not in name}
    converted = convert_official(state, model)[0]
    numbers = {float(value): key for key, value in converted.items()}
    return {name: numbers[float(value)] for name, value in state.items()}


def test_gradients_of_all_parameters_equal_the_original(case, model, images):
    model.zero_grad()
    sum(make_criterion(case, "objects")(model(images), targets_of(case, "objects")).values()).backward()
    names = official_names(case, model)
    grads = {names[name]: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert case.grads["objects"].keys() == grads.keys()
    for name in case.grads["objects"]:
        norm, projection = case.grads["objects"][name]
        got_norm, got_projection = grad_projection(name, grads[name].numpy())
        assert got_norm == pytest.approx(norm, rel=1e-3, abs=1e-4), name
        assert got_projection == pytest.approx(projection, abs=2e-3 * norm + 1e-3), name


def test_learning_rates_of_all_parameters_equal_the_original(case, model):
    optimizer = adamw(model, lr=1e-4, layer_decay=0.8, layer_decay_rule="eomt", weight_decay=0.05)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    names = official_names(case, model)
    expected = case.meta["training"]["lr"]
    got = {names[name]: rates[id(p)] for name, p in model.named_parameters()}
    assert got == pytest.approx(expected) and all(group["weight_decay"] == 0.05 for group in optimizer.param_groups)


def test_schedule_equals_the_original(case, model):
    optimizer = adamw(model, lr=1e-4, layer_decay=0.8, layer_decay_rule="eomt")
    expected = case.meta["training"]["schedule"]
    spec = dict(type="TwoStageWarmupPolyLR", warmup_steps=500, backbone_warmup_steps=1000, power=0.9)
    constructor, options = SCHEDULES.resolve(spec)
    schedule = constructor(optimizer, expected["total_steps"], epochs=1, **options)
    parts = [group.get("part") for group in optimizer.param_groups]
    backbone, others = (schedule.lr_lambdas[parts.index(part)] for part in ("backbone", None))
    for step, factors in expected["factors"].items():
        assert [backbone(int(step)), others(int(step))] == pytest.approx(factors, abs=1e-9), step


def test_annealing_equals_the_original(case):
    expected = case.meta["training"]["annealing"]
    given = MaskAnnealing(start_steps=expected["start_steps"], end_steps=expected["end_steps"])
    for step, probabilities in expected["probs"].items():
        # The original computes in float32, which loses precision just before the end.
        got = given.probabilities(int(step), 88_692, 3)
        assert got == pytest.approx(probabilities, abs=1e-5), step
        # The original's steps are fractions of its 12 epochs of 7391 steps.
        assert MaskAnnealing().probabilities(int(step), 88_692, 3) == pytest.approx(got, abs=1e-12), step


def pixels(result):
    """Return the class and the segment of every pixel in the original's form; class 133 and segment -1 are void."""
    found = torch.tensor([133, -1]).repeat(*result.segment_ids.shape, 1)
    for segment in result.segments:
        found[result.segment_ids == segment["id"]] = torch.tensor([segment["label"], segment["id"] - 1])
    return found


@pytest.mark.parametrize("thresholds", ["0.8_0.8", "0.3_0.1"])
@pytest.mark.parametrize("index", [0, 1])
def test_panoptic_maps_equal_the_original(case, outputs, index, thresholds):
    post = case.meta["post"]
    geometry = Geometry((96, 128), tuple(post["scaled"][index]), tuple(post["original_sizes"][index]))
    masks, logits = outputs["pred_masks"][index].detach() - 6, outputs["pred_logits"][index].detach() * 3
    assert_golden(case, {f"post_logits_{index}": upsample(masks, geometry)})
    scores, overlap = (float(value) for value in thresholds.split("_"))
    settings = PanopticRules(object_threshold=scores, overlap_threshold=overlap)
    things = [label not in post["stuff_classes"] for label in range(133)]
    got = panoptic(logits.softmax(-1), masks, geometry, things=things, rules=settings)
    expected = torch.from_numpy(case.expected[f"post_panoptic_{thresholds}_{index}"].values)
    assert (pixels(got) == expected).float().mean() > 0.999


def test_synthetic_panoptic_maps_equal_the_original(case):
    inputs = case.torch_inputs()
    logits, masks = inputs["syn_cls"][0].clone(), inputs["syn_mask"][0] * 3
    masks = masks + torch.linspace(-6, -2, 16)[:, None, None]
    logits[:, 80:90] += 6
    names = [name for name in case.expected if name.startswith("syn_panoptic")]
    assert names
    for name in names:
        overlap = float(name.rsplit("_", 1)[1])
        threshold = float(name.rsplit("_", 2)[1])
        settings = PanopticRules(object_threshold=threshold, overlap_threshold=overlap)
        size = tuple(masks.shape[-2:])
        got = panoptic(
            logits.softmax(-1), masks, Geometry(size, size, size), things=[i < 80 for i in range(133)], rules=settings
        )
        expected = torch.from_numpy(case.expected[name].values)
        assert torch.equal(pixels(got), expected.long()), name


def test_semantic_windows_equal_the_originals_rule(model):
    """Windows along the long side; per-pixel scores averaged where they overlap, then resized."""
    torch.manual_seed(0)
    set_tasks(model, "semantic")
    try:
        image = torch.randint(0, 256, (1, 3, 96, 300), dtype=torch.uint8)
        with torch.no_grad():
            outputs = model(image)
            ((_, got),) = model.semantic_scores(outputs, 0, (50, 170))
        sums, counts = torch.zeros(133, 96, 300), torch.zeros(300)
        for left in (0, 86, 172):
            with torch.no_grad():
                window = model(image[..., left : left + 128])
            masks = F.interpolate(window["pred_masks"], (96, 128), mode="bilinear")[0].sigmoid()
            sums[..., left : left + 128] += torch.einsum(
                "qhw,qc->chw", masks, window["pred_logits"][0].softmax(-1)[:, :-1]
            )
            counts[left : left + 128] += 1
        assert outputs["windows"].tolist() == [[0, 0, 0], [0, 0, 86], [0, 0, 172]]
        expected = F.interpolate((sums / counts)[None], (50, 170), mode="bilinear")[0]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        (result,) = model.postprocess(outputs, [(50, 170)])
        assert (result["semantic"] == expected.argmax(0)).float().mean() > 0.999
    finally:
        set_tasks(model, "panoptic")
