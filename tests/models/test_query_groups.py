"""Groups of queries in training (Group DETR, H-DETR) under every head that has queries."""

import pytest
import torch

from vitkit.checkpoint import load_weights
from vitkit.config import load_config
from vitkit.errors import ConfigError, DataError
from vitkit.models import build_model
from vitkit.registry import CRITERIA

SMALL = dict(d_model=32, num_heads=2, d_ffn=32, dropout=0.0, num_decoder_layers=2)
PYRAMID = dict(type="PyramidProjection", in_features=["res3", "res4"], out_channels=32, num_groups=4)
DEFORMABLE = dict(type="DeformableDETRHead", num_points=2, num_encoder_layers=1, **SMALL)
MASKS = dict(type="FPNPixelDecoder", out_channels=32, mask_channels=16)
HEADS = {
    "detr": dict(
        type="DETR",
        neck=dict(type="ChannelProjection", out_channels=32),
        head=dict(type="DETRHead", num_encoder_layers=1, **SMALL),
    ),
    "deformable_detr": dict(type="DeformableDETR", neck=PYRAMID, head=DEFORMABLE),
    "two_stage": dict(type="DeformableDETR", neck=PYRAMID, head=dict(DEFORMABLE, refine_boxes=True, two_stage=True)),
    "dino": dict(
        type="DeformableDETR",
        neck=PYRAMID,
        head=dict(DEFORMABLE, refine_boxes=True, two_stage=True, mixed_selection=True, box_positions=True),
    ),
    "maskformer": dict(type="MaskClassification", neck=MASKS, head=dict(type="MaskFormerHead", **SMALL)),
    "mask2former": dict(
        type="MaskClassification", neck=MASKS, head=dict(type="Mask2FormerHead", num_levels=1, **SMALL)
    ),
}
NUM_QUERIES = 5


def build(head: str, **options):
    torch.manual_seed(0)
    backbone = dict(type="ResNet", depth=18, norm="frozen_bn", pretrained=False)
    return build_model(dict(HEADS[head], backbone=backbone, num_queries=NUM_QUERIES, num_classes=3, **options))


def build_pair(head: str, **options):
    """Return a model with groups, and one without that has the same weights."""
    grouped, plain = build(head, **options).train(), build(head).train()
    load_weights(plain, grouped.state_dict())
    return grouped, plain


def batch(counts=(2, 1)):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(len(counts), 3, 64, 96, generator=generator)
    targets = [
        dict(
            labels=torch.randint(3, (n,), generator=generator),
            boxes_cxcywh=0.2 + 0.4 * torch.rand(n, 4, generator=generator),
            masks=torch.rand(n, 64, 96, generator=generator) > 0.5,
        )
        for n in counts
    ]
    return images, targets


def make_criterion(head: str):
    if head in ("maskformer", "mask2former"):
        costs = dict(cost_labels=2.0, cost_mask=5.0, cost_dice=5.0)
        return CRITERIA.build(
            dict(
                type="MaskCriterion",
                mask_loss="focal",
                no_object_weight=0.1,
                weights=dict(labels=2.0, mask=5.0, dice=5.0),
                matcher=dict(type="HungarianMaskMatcher", mask_cost="focal", **costs),
            )
        )
    sigmoid = dict(class_loss="focal") if head != "detr" else dict(no_object_weight=0.1)
    activation = "softmax" if head == "detr" else "sigmoid"
    matcher = dict(type="HungarianMatcher", activation=activation, cost_labels=2.0, cost_l1=5.0, cost_giou=2.0)
    return CRITERIA.build(
        dict(type="SetCriterion", weights=dict(labels=2.0, l1=5.0, giou=2.0), matcher=matcher, **sigmoid)
    )


def tensors(outputs: dict) -> dict[str, torch.Tensor]:
    """Return the predictions of all layers, without groups."""
    layers = {"": outputs} | {f"aux{i}_": layer for i, layer in enumerate(outputs["aux_outputs"])}
    return {
        prefix + name: value
        for prefix, layer in layers.items()
        for name, value in layer.items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("head", HEADS)
def test_first_group_in_training_equals_a_model_without_groups(head):
    grouped, plain = build_pair(head, groups=3, one_to_many_queries=8, one_to_many_repeats=2)
    images, _ = batch()
    with torch.no_grad():
        outputs, expected = grouped(images), plain(images)
    groups = [*outputs["groups"], outputs["one_to_many"]]
    assert [group["pred_logits"].shape[1] for group in groups] == [NUM_QUERIES, NUM_QUERIES, 8]
    assert outputs["one_to_many"]["repeats"] == 2
    for group in groups:
        assert len(group["aux_outputs"]) == len(expected["aux_outputs"])
        assert not torch.allclose(group["pred_logits"][:, :NUM_QUERIES], outputs["pred_logits"])
    assert not {"groups", "one_to_many"} & expected.keys()
    for name, value in tensors(expected).items():
        torch.testing.assert_close(tensors(outputs)[name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_inference_uses_only_the_first_group(head):
    grouped, plain = (model.eval() for model in build_pair(head, groups=2))
    images, _ = batch()
    with torch.no_grad():
        outputs, expected = grouped(images), plain(images)
    assert outputs.keys() == expected.keys()
    for name, value in tensors(expected).items():
        assert torch.equal(tensors(outputs)[name], value)


@pytest.mark.parametrize("counts", [(2, 1), (0, 2), (0, 0)])
@pytest.mark.parametrize("head", HEADS)
def test_loss_keys_are_constant_and_gradients_reach_every_parameter(head, counts):
    model = build(head, groups=2, one_to_many_queries=6, one_to_many_repeats=3).train()
    images, targets = batch(counts)
    losses = make_criterion(head)(model(images), targets)
    terms = ("labels", "mask", "dice") if "mask" in head else ("labels", "l1", "giou")
    num_aux = 2 if head == "mask2former" else 1
    layers = ["", *(f"aux{i}_" for i in range(num_aux))]
    expected = {f"{many}{layer}{term}" for many in ("", "many_") for layer in layers for term in terms}
    assert {name for name in losses if not name.startswith("enc_")} == expected
    sum(losses.values()).backward()
    trained = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad]
    assert not [name for name, gradient in trained if gradient is None or not gradient.isfinite().all()]
    assert all((p.grad.abs().sum(1) > 0).all() for p in model.head.group_queries.parameters())


@pytest.mark.parametrize("head", HEADS)
def test_losses_are_the_mean_over_separately_matched_groups(head):
    model, criterion = build(head, groups=3).train(), make_criterion(head)
    images, targets = batch()
    outputs = model(images)
    losses = criterion(outputs, targets)
    extra = {name: outputs[name] for name in ("input_size", "enc_outputs", "selected_outputs") if name in outputs}
    alone = [
        criterion({**group, **extra}, targets)
        for group in ({k: v for k, v in outputs.items() if k != "groups"}, *outputs["groups"])
    ]
    for name, value in losses.items():
        torch.testing.assert_close(value, sum(each[name] for each in alone) / 3)


@pytest.mark.parametrize("head", ["deformable_detr", "mask2former"])
def test_one_to_many_matches_each_target_several_times(head):
    model, criterion = build(head, one_to_many_queries=6, one_to_many_repeats=3).train(), make_criterion(head)
    images, targets = batch()
    outputs = model(images)
    losses = criterion(outputs, targets)
    group = outputs["one_to_many"]
    repeated = [{name: torch.cat([value] * 3) for name, value in target.items()} for target in targets]
    extra = {name: outputs[name] for name in ("input_size",) if name in outputs}
    expected = criterion({**group, **extra}, repeated)
    assert {name for name in losses if name.startswith("many_")} == {f"many_{name}" for name in expected}
    for name, value in expected.items():
        torch.testing.assert_close(losses[f"many_{name}"], value)
    plain = criterion({k: v for k, v in outputs.items() if k != "one_to_many"}, targets)
    for name, value in plain.items():
        torch.testing.assert_close(losses[name], value)


def test_accuracy_counts_only_the_queries_of_the_first_group():
    model, criterion = build("detr", groups=3, one_to_many_queries=6).train(), make_criterion("detr")
    images, targets = batch((2, 1))
    criterion(model(images), targets)
    assert criterion.meters["matched_accuracy"].compute()[1] == 3


@pytest.mark.parametrize("head", HEADS)
def test_weights_with_another_number_of_groups_load(head):
    grouped, plain = build(head, groups=3), build(head)
    fresh = {name: p.clone() for name, p in grouped.head.group_queries.named_parameters()}
    report = load_weights(grouped, plain.state_dict())
    assert not report.missing and not report.unexpected
    state = grouped.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert all(torch.equal(p, fresh[name]) for name, p in grouped.head.group_queries.named_parameters())
    more = build(head, groups=4)
    load_weights(more, grouped.state_dict())
    load_weights(plain, grouped.state_dict())
    again = build(head, groups=3)
    torch.manual_seed(1)
    load_weights(again, grouped.state_dict())
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())


def test_two_stage_models_need_a_location_for_each_query_of_every_group():
    model = build("two_stage", groups=30).train()  # 8 x 12 locations and 4 x 6 less, and 150 queries
    with pytest.raises(DataError, match=r"fewer than the 150 queries.*model\.num_queries.*model\.groups"):
        model(torch.rand(1, 3, 64, 96))
    assert len(model.eval()(torch.rand(1, 3, 64, 96))["pred_logits"][0]) == NUM_QUERIES


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(groups=0), "model.groups: got 0; expected at least 1"),
        (
            dict(one_to_many_queries=10, one_to_many_repeats=4),
            "one_to_many_queries=10 does not divide by model.one_to_many_repeats=4.*set 8 or 12 queries",
        ),
        (dict(one_to_many_queries=3, one_to_many_repeats=4), "set 4 queries, or a divisor of 3"),
        (dict(one_to_many_queries=-1), "one_to_many_queries=-1.*expected at least 0"),
        (dict(one_to_many_queries=4, one_to_many_repeats=0), "one_to_many_repeats=0: expected at least"),
        (dict(group=2), "unknown argument 'group'. Did you mean 'groups'"),
    ],
)
def test_wrong_groups_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        build("detr", **options)


def test_a_detr_with_masks_refuses_groups():
    spec = dict(HEADS["detr"], type="DETRSegmentation", num_queries=NUM_QUERIES)
    spec |= dict(head=dict(spec["head"], groups=2), backbone=dict(type="ResNet", depth=18, pretrained=False))
    with pytest.raises(ConfigError, match="masks are of the usual queries alone. Leave groups"):
        build_model(spec)


def test_overrides_reach_the_head_and_the_criterion():
    config = load_config(
        "configs/quickstart/deformable_detr.py", ["model.groups=3", "criterion.class_loss=mal"], check=True
    )
    assert build_model(config["model"]).head.group_queries.num_further == 40
    assert CRITERIA.build(config["criterion"]).class_loss == "mal"


@pytest.mark.slow
@pytest.mark.parametrize("head", ["detr", "deformable_detr"])
def test_overfits_two_images_with_groups(head, monkeypatch):
    if head == "detr":  # it learns slowly with post-norm layers
        monkeypatch.setitem(HEADS, head, dict(HEADS[head], head=dict(HEADS[head]["head"], norm_first=True)))
    model, criterion = build(head, groups=2, one_to_many_queries=6, one_to_many_repeats=3).train(), make_criterion(head)
    images, targets = batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history = []
    for _ in range(120):
        losses = criterion(model(images), targets)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append({name: value.item() for name, value in losses.items()})
    for name in ("l1", "giou", "many_l1", "many_giou"):
        assert history[-1][name] < 0.5 * history[0][name], name
