"""The recipe of real-time detectors: which augmentation is active in which epoch, and the published sizes."""

import re

import pytest
import torch

from vitkit import build_model
from vitkit.config import check_config
from vitkit.config.load import load_config
from vitkit.configs.parts.realtime import deim_data, dfine_data, flat_cosine, square_sizes, training
from vitkit.data.loading.batch_augmentation import Mixup, Squares
from vitkit.data.loading.settings import DataSettings
from vitkit.data.transforms.by_epoch import TransformsByEpoch
from vitkit.data.transforms.grid_mosaic import GridMosaic
from vitkit.engine.optimizers import parameter_groups
from vitkit.model_zoo.converters import ecdet
from vitkit.model_zoo.converters.deimv2 import OFFICIAL
from vitkit.registry import TRANSFORMS


def names(transforms) -> list[str]:
    """Return the names of a pipeline's albumentations."""
    return [type(each).__name__ for each in transforms._compose.transforms]


STRONG = ["PhotometricDistort", "RandomZoomOut", "RandomIoUCrop", "HorizontalFlip"]


def test_sizes_are_those_of_the_originals():
    assert sorted(set(square_sizes(640, 6))) == list(range(480, 801, 32))
    assert square_sizes(640, 6).count(640) == 6 and len(square_sizes(640, 20)) == 30


def test_strong_augmentation_of_d_fine_stops():
    data = dfine_data(strong_until=72, size_repeats=4)
    transforms = TRANSFORMS.build(data["train"]["transforms"])
    assert isinstance(transforms, TransformsByEpoch)
    assert names(transforms.at(0)) == names(transforms.at(71)) == STRONG
    assert names(transforms.at(72)) == names(transforms.at(79)) == ["HorizontalFlip"]
    squares = Squares(**data["squares"])
    assert len(squares.sizes) == 14 and (squares.until_epoch, squares.final_size) == (72, 640)
    assert dfine_data(strong_until=148)["squares"] == dict(sizes=[640])


def test_augmentation_of_deim_has_four_parts():
    data = deim_data(4, 64, 120, size_repeats=20)
    transforms = TRANSFORMS.build(data["train"]["transforms"])
    for epoch in (0, 3, 120, 131):
        assert names(transforms.at(epoch)) == ["HorizontalFlip"]
    for epoch in (4, 63):
        mosaic = transforms.at(epoch)
        assert isinstance(mosaic, GridMosaic) and mosaic.tile == 320
        assert names(mosaic.transforms) == ["PhotometricDistort", "HorizontalFlip"]
        assert names(mosaic.otherwise) == STRONG
    assert names(transforms.at(64)) == names(transforms.at(119)) == STRONG
    mixup = Mixup(**data["mixup"])
    assert (mixup.from_epoch, mixup.until_epoch, tuple(mixup.share)) == (4, 64, (0.45, 0.55))


@pytest.mark.parametrize("data", [dfine_data(120, size_repeats=20), deim_data(4, 64, 120, size_repeats=20)])
def test_sections_are_valid(data):
    cfg = load_config("configs/quickstart/detr.py")
    cfg["data"] = data
    cfg["train"] = training(132, 120)
    cfg["schedule"] = flat_cosine(64, 120)
    check_config(cfg)
    DataSettings(**data)


def test_other_datasets_take_the_recipe():
    own = dict(train=dict(type="ShapesDetection", num_images=4), val=dict(type="ShapesDetection", num_images=2))
    data = dfine_data(2, size=64, size_repeats=1, data=own)
    assert data["train"]["type"] == "ShapesDetection" and data["squares"]["sizes"] == [32, 64]
    dataset = DataSettings(**data).dataset("train")
    assert dataset.transforms_by_epoch is not None


# lr, backbone_lr, weight decay, epochs, strong augmentation until, repeats of 640, batch, decay of the restarted EMA
DFINE = {
    "n": (8e-4, 4e-4, 1e-4, 160, 148, None, 128, 0.9999),
    "s": (2e-4, 1e-4, 1e-4, 132, 120, 20, 32, 0.9999),
    "m": (2e-4, 2e-5, 1e-4, 132, 120, 6, 32, 0.9999),
    "l": (2.5e-4, 1.25e-5, 1.25e-4, 80, 72, 4, 32, 0.9999),
    "x": (2.5e-4, 2.5e-6, 1.25e-4, 80, 72, 3, 32, 0.9998),
}
# Those that DEIM changes, and until which epoch it makes mosaics; the rates stay flat as long, but for N's: to the end.
DEIM = {
    "n": dict(mosaic_until=78),
    "s": dict(rates=(4e-4, 2e-4), epochs=(132, 120), mosaic_until=64),
    "m": dict(rates=(4e-4, 4e-5), epochs=(102, 90), mosaic_until=49),
    "l": dict(rates=(5e-4, 2.5e-5), epochs=(58, 50), mosaic_until=29),
    "x": dict(rates=(5e-4, 5e-6), epochs=(58, 50), mosaic_until=29),
}


@pytest.mark.parametrize("size", DFINE)
@pytest.mark.parametrize("by_deim", [False, True])
def test_settings_of_d_fine_and_deim_are_those_of_the_originals(size, by_deim):
    cfg = load_config(f"{'deim_' if by_deim else ''}dfine_{size}_coco")
    lr, backbone_lr, decay, epochs, strong_until, repeats, batch, restarted = DFINE[size]
    if by_deim:
        lr, backbone_lr = DEIM[size].get("rates", (lr, backbone_lr))
        epochs, strong_until = DEIM[size].get("epochs", (epochs, strong_until))
    optimizer, train, data = cfg["optimizer"], cfg["train"], cfg["data"]
    assert (optimizer["lr"], optimizer["backbone_lr"], optimizer["weight_decay"]) == (lr, backbone_lr, decay)
    assert (train["epochs"], train["restart_epoch"], train["reference_batch_size"]) == (epochs, strong_until, batch)
    assert (train["ema_decay"], train["ema_ramp_steps"], train["restart_ema_decay"]) == (0.9999, 1000, restarted)
    assert train["clip_grad_norm"] == 0.1
    assert data["squares"]["sizes"].count(640) == (repeats or 1)
    assert data["squares"].get("until_epoch") == (repeats and strong_until)
    head, queries = cfg["model"]["head"], cfg["model"]["training_queries"][0]
    assert head["reg_scale"] == (8 if size == "x" else 4) and (head["reg_max"], head["up"]) == (32, 0.5)
    assert queries["num_queries"] == 100 and (queries["label_noise"], queries["box_noise"]) == (0.5, 1.0)
    assert cfg["criterion"]["class_loss"] == ("mal" if by_deim else "varifocal")
    assert head["activation"] == ("silu" if by_deim else "relu")
    mosaic_until = DEIM[size]["mosaic_until"] if by_deim else None
    assert data["train"]["transforms"]["until_epochs"] == [*([4, mosaic_until] if by_deim else []), strong_until]
    flat = dict(type="FlatCosineLR", flat_until_epoch=mosaic_until, cosine_until_epoch=strong_until)
    schedule = flat | dict(end_factor=1.0 if size == "n" else 0.5) if by_deim else dict(type="ConstantLR")
    assert cfg["schedule"] == schedule | dict(warmup_steps=2000 if by_deim else 500)


def rates_and_decays(cfg) -> dict[str, tuple[float, float]]:
    """Return the learning rate and the weight decay of each trained parameter."""
    with torch.device("meta"):
        model = build_model(cfg["model"])
    groups = parameter_groups(model, **{key: value for key, value in cfg["optimizer"].items() if key != "type"})
    of = {id(p): (pytest.approx(group["lr"]), group["weight_decay"]) for group in groups for p in group["params"]}
    return {name: of[id(value)] for name, value in model.named_parameters() if id(value) in of}


def test_biases_decay_only_in_the_larger_sizes_of_d_fine():
    for size, decay in (("n", 0), ("l", 1.25e-4)):
        of = rates_and_decays(load_config(f"dfine_{size}_coco"))
        lr, backbone_lr = DFINE[size][:2]
        assert of["head.decoder.layers.0.ffn.linear1.bias"] == (lr, decay)
        assert of["neck.encoder.norm1.weight"] == of["head.decoder.layers.0.gateway.norm.bias"] == (lr, 0)
        assert of["backbone.net.stages_3.blocks.0.layers.0.conv1.conv.weight"][0] == backbone_lr
        assert ("backbone.net.stem.stem1.conv.weight" in of) == (size == "n")


@pytest.mark.parametrize("size", DFINE)
def test_deim_trains_stem_and_batch_norms_in_all_sizes(size):
    of = rates_and_decays(load_config(f"deim_dfine_{size}_coco"))
    lr, backbone_lr, decay = DFINE[size][:3]
    lr, backbone_lr = DEIM[size].get("rates", (lr, backbone_lr))
    assert of["backbone.net.stem.stem1.conv.weight"] == (backbone_lr, decay)
    # By the original's patterns, the norms of S and M train at the full rate without decay, the others' like the rest.
    assert of["backbone.net.stem.stem1.bn.weight"] == ((lr, 0) if size in ("s", "m") else (backbone_lr, decay))
    assert of["neck.encoder.norm1.weight"] == (lr, 0)
    assert of["head.decoder.layers.0.ffn.linear1.bias"] == (lr, 0 if size == "n" else decay)


@pytest.mark.parametrize("name", ["rf_detr_n_coco", "rf_detr_seg_n_coco", "rf_detr_keypoints_coco"])
def test_rates_of_rf_detr_decrease_with_depth(name):
    cfg = load_config(name)
    of = rates_and_decays(cfg)
    for block in range(12):
        lr = 1.5e-4 * 0.7**2 * 0.8 ** (13 - block)
        assert of[f"backbone.blocks.{block}.attn.qkv.weight"] == (lr, 1e-4)
        assert of[f"backbone.blocks.{block}.norm1.weight"] == (lr, 0)
    assert of["backbone.pos_embed"] == of["backbone.patch_embed.proj.weight"] == (1.5e-4 * 0.7**2 * 0.8**14, 0)
    assert of["head.decoder.layers.1.ffn.linear1.weight"] == (0.7e-4, 1e-4)
    assert of["neck.conv1.conv.weight"] == of["head.class_embed.weight"] == of["head.bbox_embed.layers.0.bias"]
    assert of["head.class_embed.weight"] == (1e-4, 1e-4)
    if "keypoints" in name:
        # Only what is within the original's decoder.
        assert of["head.keypoint_head.positions"] == of["head.keypoint_head.layers.0.query_scale"] == (0.7e-4, 1e-4)
        assert of["head.keypoint_head.queries.queries"] == of["neck.keypoints.conv1.conv.weight"] == (1e-4, 1e-4)
    train = cfg["train"]
    assert (train["ema_decay"], train["ema_ramp_steps"], train["clip_grad_norm"]) == (0.993, 100, 0.1)
    assert (train["epochs"], train["reference_batch_size"], cfg["evaluator"]["max_dets"]) == (100, 16, 500)


@pytest.mark.parametrize(
    ("name", "settings", "sizes"),
    [
        ("rf_detr_n_coco", (384, 2, 300), range(224, 545, 32)),
        ("rf_detr_s_coco", (512, 3, 300), range(352, 673, 32)),
        ("rf_detr_m_coco", (576, 4, 300), range(416, 737, 32)),
        ("rf_detr_l_coco", (704, 4, 300), range(544, 865, 32)),
        ("rf_detr_seg_n_coco", (312, 4, 100), range(252, 373, 12)),
        ("rf_detr_seg_s_coco", (384, 4, 100), range(264, 505, 24)),
        ("rf_detr_seg_m_coco", (432, 5, 200), range(312, 553, 24)),
        ("rf_detr_seg_l_coco", (504, 5, 200), range(384, 625, 24)),
        ("rf_detr_keypoints_coco", (576, 4, 100), range(456, 697, 24)),
    ],
)
def test_sizes_of_rf_detr_are_those_of_the_original(name, settings, sizes):
    cfg = load_config(name)
    model = cfg["model"]
    got = model["backbone"]["image_size"], model["head"]["num_decoder_layers"], model["num_queries"]
    assert got == settings and model["num_detections"] == model["num_queries"]
    assert cfg["data"]["val"]["transforms"]["size"] == [settings[0]] * 2
    assert cfg["data"]["squares"]["sizes"] == list(sizes)
    assert model["backbone"]["num_windows"] == (1 if name == "rf_detr_seg_n_coco" else 2)


DEIMV2_RATES = {
    "atto": [(r"^(?=.*backbone)(?!.*norm|bn).*$", 0.5, 1), (r"^(?=.*(?:encoder|decoder))(?=.*(?:norm|bn)).*$", 1, 0)],
    "n": [(r"^(?=.*backbone)(?!.*norm|bn).*$", 0.5, 1), (r"^(?=.*(?:encoder|decoder))(?=.*(?:norm|bn|bias)).*$", 1, 0)],
    "s": [
        (r"^(?=.*.dinov3)(?!.*(?:norm|bn|bias)).*$", 0.05, 1),
        (r"^(?=.*.dinov3)(?=.*(?:norm|bn|bias)).*$", 0.05, 0),
        (r"^(?=.*(?:sta|encoder|decoder))(?=.*(?:norm|bn|bias)).*$", 1, 0),
    ],
}
"""The originals' patterns of names, with factors on rate and decay."""
DEIMV2_DIFFERENCES = {
    "atto": [f"encoder.down_sample{i}.2.{leaf}" for i in (1, 2) for leaf in ("weight", "bias")],
    "n": [],
    "s": [f"backbone.norms.{i}.bias" for i in range(3)],
}
"""What decays in the originals, whose patterns do not find these norms, and not here."""


@pytest.mark.parametrize("size", DEIMV2_RATES)
def test_rates_and_decays_of_deimv2_are_those_of_the_originals(size):
    cfg = load_config(f"deimv2_{size}_coco")
    ours = rates_and_decays(cfg)
    lr, decay = cfg["optimizer"]["lr"], cfg["optimizer"]["weight_decay"]
    with torch.device("meta"):
        model = build_model(cfg["model"])
    names = [name for name, _ in model.named_parameters()]
    numbers = {name: torch.full(p.shape, float(i)) for i, (name, p) in enumerate(model.named_parameters())}
    differ = []
    for theirs, value in OFFICIAL[0].table.write(numbers, model).items():
        if theirs.endswith((".up", "reg_scale", "points_scale", "anchors", "valid_mask", "periods")):
            continue
        rate, decays = next(((a, b) for pattern, a, b in DEIMV2_RATES[size] if re.search(pattern, theirs)), (1, 1))
        if ours[names[int(value.flatten()[0])]] != (pytest.approx(lr * rate), decay * decays):
            differ.append(theirs)
    assert differ == DEIMV2_DIFFERENCES[size]


@pytest.mark.parametrize("size", ["atto", "femto", "pico", "n", "s", "m", "l", "x"])
def test_settings_of_deimv2_change_with_the_epochs_of_the_originals(size):
    cfg = load_config(f"deimv2_{size}_coco")
    data, train, late = cfg["data"], cfg["train"], cfg["criterion"]["matcher"]["late"]
    is_lite = size in ("atto", "femto", "pico")
    until, stop, epochs, changed = {
        "n": (78, 148, 160, 136), "s": (64, 120, 132, 100), "m": (49, 90, 102, 80), "l": (34, 60, 68, 50),
        "x": (29, 50, 58, 45),
    }.get(size, (250, 400, 500, 450))  # fmt: skip
    assert data["train"]["transforms"]["until_epochs"] == [4, until, stop]
    assert (train["epochs"], train["restart_epoch"]) == (epochs, 468 if is_lite else stop)
    assert late == dict(epoch=changed, power=4.0)
    assert (data.get("mixup") is None) == (data.get("copy_blend") is None) == is_lite
    if not is_lite:
        assert (data["mixup"]["from_epoch"], data["mixup"]["until_epoch"]) == (4, until)
        blend = data["copy_blend"]
        assert (blend["from_epoch"], blend["until_epoch"]) == (4, until if size == "n" else stop)
    side = dict(atto=320, femto=416).get(size, 640)
    mosaic = data["train"]["transforms"]["transforms"][1]
    assert (mosaic["tile"], mosaic["probability"]) == (side // 2, 0.3 if size == "atto" else 0.5)
    smallest = dict(atto=12, femto=10, pico=8).get(size, 1)
    assert mosaic["otherwise"]["min_box_side"] == smallest
    repeats = dict(s=20, m=6, l=3, x=3).get(size)
    assert data["squares"]["sizes"].count(side) == (repeats or 1)
    assert (len(data["squares"]["sizes"]) > 1) == (repeats is not None)
    assert train["reference_batch_size"] == (128 if is_lite else 32)
    assert cfg["criterion"].get("union", True) != is_lite


# backbone_lr, weight decay, epochs, strong augmentation until, mosaics and mixup until, their probability
EDGECRAFTER = {
    "ecdet_s_coco": (2.5e-5, 1e-4, 74, 72, 36, 0.75),
    "ecdet_m_coco": (2.5e-5, 1e-4, 62, 60, 30, 0.75),
    "ecdet_l_coco": (5e-6, 1.25e-4, 50, 48, 24, 1.0),
    "ecdet_x_coco": (2.5e-6, 1.25e-4, 50, 48, 24, 1.0),
    "ecseg_s_coco": (2.5e-5, 1e-4, 74, 72, 36, 0.75),
    "ecseg_m_coco": (2.5e-5, 1e-4, 74, 72, 36, 0.75),
    "ecseg_l_coco": (2.5e-6, 1.25e-4, 50, 48, 24, 1.0),
    "ecseg_x_coco": (2.5e-6, 1.25e-4, 50, 48, 24, 1.0),
}


@pytest.mark.parametrize("name", EDGECRAFTER)
def test_settings_of_edgecrafter_are_those_of_the_original(name):
    cfg = load_config(name)
    check_config(cfg)
    backbone_lr, decay, epochs, strong_until, mosaic_until, probability = EDGECRAFTER[name]
    optimizer, train, data = cfg["optimizer"], cfg["train"], cfg["data"]
    assert (optimizer["lr"], optimizer["backbone_lr"], optimizer["weight_decay"]) == (5e-4, backbone_lr, decay)
    assert (train["epochs"], train["restart_epoch"], train["reference_batch_size"]) == (epochs, strong_until, 32)
    assert (train["ema_decay"], train["ema_ramp_steps"], train["restart_ema_decay"]) == (0.9999, 1000, 0.9999)
    transforms = TRANSFORMS.build(data["train"]["transforms"])
    for epoch in (0, mosaic_until - 1):  # without a first part
        assert isinstance(transforms.at(epoch), GridMosaic) and transforms.at(epoch).probability == probability
    assert names(transforms.at(mosaic_until)) == names(transforms.at(strong_until - 1)) == STRONG
    assert names(transforms.at(strong_until)) == ["HorizontalFlip"]
    mixup = Mixup(**data["mixup"])
    assert (mixup.from_epoch, mixup.until_epoch, mixup.probability) == (0, mosaic_until, probability)
    assert data["squares"] == dict(sizes=[640])
    assert cfg["schedule"] == flat_cosine(mosaic_until, strong_until)
    criterion, matcher = cfg["criterion"], cfg["criterion"]["matcher"]
    assert "late" not in matcher and criterion["class_loss"] == "mal"
    masks = "ecseg" in name
    weights = dict(labels=2.0, l1=1.0, giou=1.0, mask=5.0, dice=5.0) if masks else dict(labels=1.0, l1=5.0, giou=2.0)
    assert criterion["weights"] == weights | dict(fgl=0.15, ddf=1.5)
    costs = {name.removeprefix("cost_"): cost for name, cost in matcher.items() if name.startswith("cost_")}
    assert costs == weights | dict(labels=2.0)
    assert data["train"].get("masks", False) == data["val"].get("masks", False) == masks


@pytest.mark.parametrize("name", ["ecdet_s_coco", "ecdet_l_coco", "ecseg_s_coco"])
def test_rates_and_decays_of_edgecrafter_are_those_of_the_original(name):
    cfg = load_config(name)
    ours, (backbone_lr, decay, *_) = rates_and_decays(cfg), EDGECRAFTER[name]
    with torch.device("meta"):
        model = build_model(cfg["model"])
    numbers = {name: torch.full(p.shape, float(i)) for i, (name, p) in enumerate(model.named_parameters())}
    of_number, seen = [ours[name] for name in numbers], 0
    for theirs, value in ecdet.OFFICIAL[0].table.write(numbers, model).items():
        if not theirs.endswith((".up", "reg_scale", "points_scale", "anchors", "valid_mask", "periods")):
            rate = backbone_lr if theirs.startswith("backbone.backbone.") else 5e-4
            decays = 0 if re.search("norm|bn|bias", theirs) else decay
            assert of_number[int(value.flatten()[0])] == (pytest.approx(rate), decays), theirs
            seen += 1
    assert seen == len(numbers)


# backbone_lr, weight decay, epochs, strong augmentation until, mosaics until
ECPOSE = {
    "s": (2.5e-5, 1e-4, 92, 90, 45),
    "m": (2.5e-5, 1e-4, 92, 90, 45),
    "l": (2.5e-6, 1.25e-4, 74, 72, 48),
    "x": (2.5e-6, 1.25e-4, 74, 72, 48),
}


@pytest.mark.parametrize("size", ECPOSE)
def test_settings_of_ecpose_are_those_of_the_original(size):
    cfg = load_config(f"ecpose_{size}_coco")
    check_config(cfg)
    backbone_lr, decay, epochs, strong_until, mosaic_until = ECPOSE[size]
    optimizer, train, data = cfg["optimizer"], cfg["train"], cfg["data"]
    assert (optimizer["lr"], optimizer["backbone_lr"], optimizer["weight_decay"]) == (5e-4, backbone_lr, decay)
    assert (train["epochs"], train["reference_batch_size"], train["ema_ramp_steps"]) == (epochs, 32, 2000)
    transforms = TRANSFORMS.build(data["train"]["transforms"])
    plain, strong = ["ColorJitter", "HorizontalFlip"], ["RandomZoomOut", "ColorJitter", "HorizontalFlip"]
    for epoch in (4, mosaic_until - 1):
        mosaic = transforms.at(epoch)
        assert isinstance(mosaic, GridMosaic) and (mosaic.probability, mosaic.tile, mosaic.scale) == (0.5, 320, (1, 1))
        assert names(mosaic.transforms) == plain and names(mosaic.otherwise) == strong
    assert names(transforms.at(mosaic_until)) == names(transforms.at(strong_until - 1)) == strong
    assert names(transforms.at(3)) == names(transforms.at(strong_until)) == plain
    mixup, blend = data["mixup"], data["copy_blend"]
    assert (mixup["probability"], blend["num_objects"]) == (0.25, 3)
    assert (1 - mixup["probability"]) * blend["probability"] == pytest.approx(0.5)  # of all batches
    assert all((part["from_epoch"], part["until_epoch"]) == (4, strong_until) for part in (mixup, blend))
    assert cfg["schedule"] == dict(type="ConstantLR", warmup_steps=500)
    assert (cfg["model"]["num_queries"], cfg["model"]["head"]["num_decoder_layers"]) == (60, 3 if size == "s" else 4)
