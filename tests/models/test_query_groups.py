"""Groups of queries in training (Group DETR, H-DETR) under every head that has queries."""

import pytest
import torch
from helpers.processes import run_anew

import vitkit
from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.errors import ConfigError, DataError
from vitkit.registry import CRITERIA
from vitkit.weights import load_weights

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
    "dino": dict(type="DINO", neck=PYRAMID, head=dict(type="DINOHead", num_points=2, num_encoder_layers=1, **SMALL)),
    "anchor_boxes": dict(
        type="DeformableDETR",
        neck=PYRAMID,
        head=dict(type="DABDeformableDETRHead", num_points=2, num_encoder_layers=1, **SMALL),
    ),
    "maskformer": dict(type="MaskFormer", neck=MASKS, head=dict(type="MaskFormerHead", **SMALL)),
    "mask2former": dict(type="Mask2Former", neck=MASKS, head=dict(type="Mask2FormerHead", num_levels=1, **SMALL)),
}
NUM_QUERIES = 5


def groups_of(count):
    return dict(type="QueryGroups", groups=count)


def one_to_many(num_queries, repeats):
    return dict(type="OneToManyQueries", num_queries=num_queries, repeats=repeats)


def build(head: str, *training_queries):
    torch.manual_seed(0)
    backbone = dict(type="ResNet", depth=18, norm="frozen_bn", pretrained=False)
    spec = dict(HEADS[head], backbone=backbone, num_queries=NUM_QUERIES, num_classes=3)
    return build_model(spec | dict(training_queries=list(training_queries)))


def build_pair(head: str, *training_queries):
    """Return a model with groups, and one without that has the same weights."""
    grouped, plain = build(head, *training_queries).train(), build(head).train()
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


def added(outputs: dict, name: str) -> list[dict]:
    """Return the outputs of the added sets of queries of a name; the first stage of two is not one of them."""
    return [entry for entry in outputs.get("training_outputs", []) if entry["name"] == name]


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
    grouped, plain = build_pair(head, groups_of(3), one_to_many(8, 2))
    images, targets = batch()
    with torch.no_grad():
        outputs, expected = grouped(images, targets=targets), plain(images)
    groups = [*added(outputs, ""), *added(outputs, "many")]
    assert [group["pred_logits"].shape[1] for group in groups] == [NUM_QUERIES, NUM_QUERIES, 8]
    assert [group["repeats"] for group in groups] == [1, 1, 2]
    for group in groups:
        assert len(group["aux_outputs"]) == len(expected["aux_outputs"])
        assert not torch.allclose(group["pred_logits"][:, :NUM_QUERIES], outputs["pred_logits"])
    assert not added(expected, "") and not added(expected, "many")
    for name, value in tensors(expected).items():
        torch.testing.assert_close(tensors(outputs)[name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_inference_uses_only_the_first_group(head):
    grouped, plain = (model.eval() for model in build_pair(head, groups_of(2)))
    images, _ = batch()
    with torch.no_grad():
        outputs, expected = grouped(images), plain(images)
    assert outputs.keys() == expected.keys()
    for name, value in tensors(expected).items():
        assert torch.equal(tensors(outputs)[name], value)


@pytest.mark.parametrize("counts", [(2, 1), (0, 2), (0, 0)])
@pytest.mark.parametrize("head", HEADS)
def test_loss_keys_are_constant_and_gradients_reach_every_parameter(head, counts):
    model = build(head, groups_of(2), one_to_many(6, 3)).train()
    images, targets = batch(counts)
    losses = make_criterion(head)(model(images, targets=targets), targets)
    terms = ("labels", "mask", "dice") if "mask" in head else ("labels", "l1", "giou")
    num_aux = 2 if head == "mask2former" else 1
    layers = ["", *(f"aux{i}_" for i in range(num_aux))]
    expected = {f"{many}{layer}{term}" for many in ("", "many_") for layer in layers for term in terms}
    assert {name for name in losses if not name.startswith("enc_")} == expected
    sum(losses.values()).backward()
    trained = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad]
    assert not [name for name, gradient in trained if gradient is None or not gradient.isfinite().all()]
    assert all((p.grad.abs().sum(1) > 0).all() for p in model.training_queries.parameters())


@pytest.mark.parametrize("head", HEADS)
def test_losses_are_the_mean_over_separately_matched_groups(head):
    model, criterion = build(head, groups_of(3)).train(), make_criterion(head)
    images, targets = batch()
    outputs = model(images, targets=targets)
    losses = criterion(outputs, targets)
    extra = {"training_outputs": added(outputs, "enc")}
    extra |= {name: outputs[name] for name in ("input_size",) if name in outputs}
    alone = [criterion({**group, **extra}, targets) for group in (outputs, *added(outputs, ""))]
    for name, value in losses.items():
        torch.testing.assert_close(value, sum(each[name] for each in alone) / 3)


@pytest.mark.parametrize("head", ["deformable_detr", "mask2former"])
def test_one_to_many_matches_each_target_several_times(head):
    model, criterion = build(head, one_to_many(6, 3)).train(), make_criterion(head)
    images, targets = batch()
    outputs = model(images, targets=targets)
    losses = criterion(outputs, targets)
    (group,) = added(outputs, "many")
    repeated = [{name: torch.cat([value] * 3) for name, value in target.items()} for target in targets]
    extra = {name: outputs[name] for name in ("input_size",) if name in outputs}
    expected = criterion({**group, **extra}, repeated)
    assert {name for name in losses if name.startswith("many_")} == {f"many_{name}" for name in expected}
    for name, value in expected.items():
        torch.testing.assert_close(losses[f"many_{name}"], value)
    plain = criterion({k: v for k, v in outputs.items() if k != "training_outputs"}, targets)
    for name, value in plain.items():
        torch.testing.assert_close(losses[name], value)


def test_accuracy_counts_only_the_queries_of_the_first_group():
    model, criterion = build("detr", groups_of(3), one_to_many(6, 6)).train(), make_criterion("detr")
    images, targets = batch((2, 1))
    criterion(model(images, targets=targets), targets)
    assert criterion.meters["matched_accuracy"].compute()[1] == 3


@pytest.mark.parametrize("head", HEADS)
def test_weights_with_another_number_of_groups_load(head):
    grouped, plain = build(head, groups_of(3)), build(head)
    fresh = {name: p.clone() for name, p in grouped.training_queries.named_parameters()}
    report = load_weights(grouped, plain.state_dict())
    assert not report.missing and not report.unexpected
    state = grouped.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert all(torch.equal(p, fresh[name]) for name, p in grouped.training_queries.named_parameters())
    more = build(head, groups_of(4))
    load_weights(more, grouped.state_dict())
    load_weights(plain, grouped.state_dict())
    again = build(head, groups_of(3))
    torch.manual_seed(1)
    load_weights(again, grouped.state_dict())
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())


def test_two_stage_models_need_a_location_for_each_query_of_every_group():
    model = build("two_stage", groups_of(30)).train()  # 8 x 12 locations and 4 x 6 less, and 150 queries
    with pytest.raises(DataError, match=r"fewer than the 150 queries.*model\.num_queries.*model\.training_queries"):
        model(torch.rand(1, 3, 64, 96), targets=batch((1,))[1])
    assert len(model.eval()(torch.rand(1, 3, 64, 96))["pred_logits"][0]) == NUM_QUERIES


@pytest.mark.parametrize(
    "training_queries, message",
    [
        (groups_of(1), "model.training_queries: groups=1: expected at least 2"),
        (one_to_many(10, 4), "num_queries=10 is not divisible by repeats=4.*set num_queries to 8 or 12"),
        (one_to_many(3, 4), "set num_queries to 4"),
        (one_to_many(0, 4), "num_queries=0, repeats=4: expected at least 1"),
        (one_to_many(4, 0), "num_queries=4, repeats=0: expected at least 1"),
        (dict(type="QueryGroups", group=2), "unknown argument 'group'. Did you mean 'groups'"),
        (dict(type="QueryGroup", groups=2), "unknown training_queries 'QueryGroup'. Did you mean 'QueryGroups'"),
        (dict(type="MaskDenoising"), "MaskDenoising needs queries that attend within masks, unlike those of DETRHead"),
    ],
)
def test_wrong_training_queries_are_named(training_queries, message):
    with pytest.raises(ConfigError, match=message):
        build("detr", training_queries)


@pytest.mark.parametrize("training_queries", [groups_of(2), one_to_many(6, 2)], ids=["groups", "one_to_many"])
def test_heads_whose_queries_are_locations_are_refused_when_the_model_is_built(training_queries):
    hybrid = dict(
        type="HybridEncoder", in_features=["res4", "res5"], out_channels=32, num_heads=2, d_ffn=32, num_blocks=1
    )
    spec = dict(type="RTDETR", num_classes=3, neck=hybrid, head=dict(type="RTDETRHead", num_points=2, **SMALL))
    message = f"{training_queries['type']} needs a head that can make further queries, unlike RTDETRHead, .* Leave it"
    with pytest.raises(ConfigError, match=f"^model.training_queries: {message}") as error:
        build_model(spec | dict(backbone="resnet18", training_queries=[training_queries]))
    assert "\n" not in str(error.value)


def test_a_kind_of_training_queries_is_given_once():
    with pytest.raises(ConfigError, match="QueryGroups is given twice"):
        build("detr", groups_of(2), groups_of(3))


def test_heads_without_queries_take_no_training_queries():
    spec = dict(type="PerPixelClassification", num_classes=3, neck=MASKS, head="PerPixelBaselineHead")
    backbone = dict(type="ResNet", depth=18, pretrained=False)
    with pytest.raises(ConfigError, match="unknown argument 'training_queries'"):
        build_model(spec | dict(backbone=backbone, training_queries=[groups_of(2)]))


def test_overrides_reach_the_model_and_the_criterion():
    overrides = ["model.training_queries=[dict(type='QueryGroups', groups=3)]", "criterion.class_loss=mal"]
    config = load_config("configs/quickstart/deformable_detr.py", overrides, check=True)
    assert build_model(config["model"]).training_queries["groups"].num_selected == 40
    assert CRITERIA.build(config["criterion"]).class_loss == "mal"


def test_a_typo_in_training_queries_is_found_before_anything_is_built():
    overrides = ["model.training_queries=[dict(type='QueryGroups', grups=3)]"]
    with pytest.raises(ConfigError, match=r"model.training_queries.0.grups: QueryGroups has no argument 'grups'"):
        load_config("configs/quickstart/deformable_detr.py", overrides, check=True)


def test_models_without_training_queries_do_not_import_them():
    program = (
        "import sys, torch; from vitkit.config import load_config; from vitkit.engine.build import build_model;"
        "model = build_model(load_config('quickstart/detr')['model']).eval();"
        "model(torch.rand(1, 3, 64, 64)); print('vitkit.training_queries' in sys.modules)"
    )
    status, printed = run_anew(program)
    assert status == 0 and printed.strip().endswith("False"), printed


def test_a_model_loaded_for_prediction_has_no_training_queries(tmp_path):
    model = build_model(load_config("quickstart/dino")["model"])
    assert any(key.startswith("training_queries.") for key in model.state_dict())
    torch.save({"model": model.state_dict(), "classes": [str(i) for i in range(91)]}, tmp_path / "w.pth")
    loaded = vitkit.load("quickstart/dino", tmp_path / "w.pth").model
    assert loaded.training_queries is None
    own = {key for key in model.state_dict() if not key.startswith("training_queries.")}
    assert own == loaded.state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("head", ["detr", "deformable_detr"])
def test_overfits_two_images_with_groups(head, monkeypatch):
    if head == "detr":  # it learns slowly with post-norm layers
        monkeypatch.setitem(HEADS, head, dict(HEADS[head], head=dict(HEADS[head]["head"], norm_first=True)))
    model, criterion = build(head, groups_of(2), one_to_many(6, 3)).train(), make_criterion(head)
    images, targets = batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history = []
    for _ in range(120):
        losses = criterion(model(images, targets=targets), targets)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append({name: value.item() for name, value in losses.items()})
    for name in ("l1", "giou", "many_l1", "many_giou"):
        assert history[-1][name] < 0.5 * history[0][name], name
