"""DEIMv2 as a whole: it learns two images, takes images of any size, and its parts are those that its config names."""

import pytest
import torch
from helpers.toy_training import Batches, run
from torch import nn

from vitkit.engine.build import build_model
from vitkit.engine.optimizers import parameter_groups
from vitkit.engine.step import set_epoch
from vitkit.errors import ConfigError, DataError
from vitkit.heads.dfine import DFINEDecoderLayer
from vitkit.matchers.hungarian import HungarianMatcher
from vitkit.registry import CRITERIA
from vitkit.structures import Batch
from vitkit.weights.locate import LAST_NAME

VIT = dict(type="ViT", d_model=32, depth=3, num_heads=2, positions="rotary")
HEAD = dict(type="DEIMv2Head", d_model=32, num_heads=4, d_ffn=48, num_decoder_layers=2, reg_max=16)
SPECS = {
    "vit": dict(
        backbone=dict(type="SpatialAdapter", vit=VIT, blocks=[0, 1, 2], channels=4, norm=False),
        neck=dict(type="DEIMv2Encoder", out_channels=32, d_ffn=48, num_heads=4, num_blocks=1, expansion=0.5),
        head=dict(HEAD, num_points=[2, 3, 1]),
    ),
    "lite": dict(
        backbone=dict(type="SmallHGNetV2", size="atto", out_features=["res4"]),
        neck=dict(type="LiteEncoder", out_channels=32, num_blocks=1, expansion=0.5),
        head=dict(HEAD, num_points=[3, 2], gate=False, shared_box_head=True),
    ),
    "ecdet": dict(
        type="ECDet",
        backbone=dict(type="ECViT", d_model=32, depth=3, num_heads=2),
        neck=dict(
            type="DEIMv2Encoder", out_channels=32, d_ffn=48, num_heads=4, num_blocks=1, expansion=0.5, activation="silu"
        ),
        head=dict(HEAD, num_points=[2, 3, 1], layer="dfine", d_ffn=47),
    ),
}
TARGETS = [
    dict(labels=torch.tensor([0, 2]), boxes_cxcywh=torch.tensor([[0.3, 0.4, 0.3, 0.4], [0.7, 0.6, 0.4, 0.3]])),
    dict(labels=torch.tensor([1]), boxes_cxcywh=torch.tensor([[0.5, 0.5, 0.6, 0.5]])),
]


def build(kind, **changes):
    torch.manual_seed(0)
    denoising = [dict(type="BoxDenoising", num_queries=6)]
    return build_model(
        dict(type="DEIMv2", num_queries=10, num_classes=3, training_queries=denoising) | SPECS[kind] | changes
    )


def criterion(kind):
    weights = dict(labels=1.0, l1=5.0, giou=2.0, fgl=0.15, ddf=1.5)
    lite = dict(union=False, weights=weights | dict(fgl=0.0, ddf=0.0)) if kind == "lite" else {}
    matcher = dict(type="HungarianMatcher", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0, activation="sigmoid")
    matcher["late"] = dict(epoch=1, power=4.0)
    return CRITERIA.build(dict(type="DFINECriterion", class_loss="mal", weights=weights, matcher=matcher) | lite)


@pytest.mark.parametrize("kind", SPECS)
def test_learns_two_images_in_both_phases_of_the_matcher(kind):
    model, loss_of = build(kind).train(), criterion(kind)
    images = torch.randn(2, 3, 64, 64)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    sums = []
    for step in range(20):
        set_epoch(loss_of, int(step >= 15))
        losses = loss_of(model(images, targets=TARGETS), TARGETS)
        sums.append(sum(value for name, value in losses.items() if name.endswith(("l1", "giou"))))
        optimizer.zero_grad()
        sum(losses.values()).backward()
        assert all(parameter.grad is not None for parameter in parameters)
        optimizer.step()
    expected = {"enc_l1", "dn_aux1_giou", *(() if kind == "lite" else ("aux1_ddf", "dn_fgl"))}
    assert expected <= losses.keys() and ("fgl" in losses) == (kind != "lite")
    assert sums[-1] < 0.8 * sums[0]


class TwoImages(Batches):
    def __len__(self):
        return 1

    def __iter__(self):
        yield Batch({"images": torch.zeros(2, 3, 64, 64)}, TARGETS)


def test_trainer_changes_the_matcher_at_its_epoch_and_after_resuming(tmp_path, monkeypatch):
    costs, epochs = HungarianMatcher.costs, {False: set(), True: set()}

    def spy(self, *args):
        cost, terms = costs(self, *args)
        epochs["iou" in terms].add(self.epoch)
        return cost, terms

    monkeypatch.setattr(HungarianMatcher, "costs", spy)

    def train(num_epochs, resume=None):
        parts = dict(model=build("vit"), criterion=criterion("vit"), loader=TwoImages())
        run(
            tmp_path / "run",
            epochs=num_epochs,
            resume=resume,
            batches_per_epoch=1,
            schedule=dict(warmup_steps=0),
            **parts,
        )

    train(1)
    assert epochs == {False: {0}, True: set()}
    train(3, tmp_path / "run" / LAST_NAME)
    assert epochs == {False: {0}, True: {1, 2}}


@pytest.mark.parametrize("kind", SPECS)
def test_images_of_any_size_are_taken_and_detections_lie_in_them(kind):
    model = build(kind, num_queries=5, num_detections=4).eval()
    for height, width in ((69, 91), (100, 70), (64, 128)):
        with torch.no_grad():
            outputs = model(torch.randn(1, 3, height, width))
        (detections,) = model.postprocess(outputs, [(height, width)])
        assert detections["boxes_xyxy"].shape == (4, 4) and outputs["pred_boxes"].isfinite().all()
    with pytest.raises(DataError, match="DEIMv2: the maps .* have .* locations, fewer than the 50 queries"):
        build(kind, num_queries=50).eval()(torch.randn(1, 3, 33, 33))


def test_positions_are_computed_once_and_the_memory_is_read_as_it_is():
    head = build("vit").head.eval()
    calls = []
    head.decoder.query_pos_head.register_forward_hook(lambda *_: calls.append(1))
    maps = {name: torch.randn(1, 32, size, size) for name, size in (("res3", 8), ("res4", 4), ("res5", 2))}
    states = []
    head.decoder.layers[0].register_forward_hook(lambda module, args, x: states.append(args[0]))
    head(maps)
    assert len(calls) == 1
    memory = torch.cat([x.flatten(2).mT for x in maps.values()], dim=1)[0]
    assert all((memory == query).all(1).any() for query in states[0][0])
    assert {type(m) for m in head.modules() if "Norm" in type(m).__name__} == {nn.RMSNorm}


def test_rms_norms_are_norms_for_the_optimizer():
    model = build("vit")
    groups = parameter_groups(model, lr=1.0, weight_decay=0.1, no_weight_decay=["head.norms"])
    undecayed = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in undecayed}
    assert names == {name for name, _ in model.named_parameters() if name.startswith("head.decoder") and "norm" in name}


def test_dfines_layer_has_its_norms_and_the_heads_activation():
    head = build("ecdet").head
    assert {type(m) for m in head.modules() if "Norm" in type(m).__name__} == {nn.LayerNorm}
    assert {type(layer) for layer in head.decoder.layers} == {DFINEDecoderLayer}
    assert {layer.ffn.activation for layer in head.decoder.layers} == {"silu"}


@pytest.mark.parametrize(("changes", "message"), [
    (dict(layer="detr"), "DEIMv2Head: layer='detr': expected 'deimv2' or 'dfine'"),
    (dict(layer="dfine", gate=False), "DEIMv2Head: gate=False: layer='dfine' always has a gate"),
    (dict(d_ffn=47), "DEIMv2Head: d_ffn=47: expected an even number"),
])  # fmt: skip
def test_wrong_layers_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        build("vit", head=dict(SPECS["vit"]["head"], **changes))
