"""Every config of mask classification: valid, of the published size, and with the published optimizer settings."""

import pytest
import timm
import torch

from vitkit.config import config_names, load_config
from vitkit.engine.build import build_model
from vitkit.registry import CRITERIA, OPTIMIZERS

BACKBONES = ("r50", "r101", "swin_tiny", "swin_small", "swin_base", "swin_large")
MASK2FORMER_TASKS = {
    "coco_instance": 80,
    "coco_panoptic": 133,
    "ade20k_semantic": 150,
    "ade20k_panoptic": 150,
    "ade20k_instance": 100,
    "cityscapes_semantic": 19,
    "cityscapes_panoptic": 19,
    "cityscapes_instance": 8,
}
EOMT_SIZES = ("small", "base", "large")
EOMT_TASKS = ("coco_instance", "coco_panoptic", "ade20k_semantic")
NUM_CLASSES = (
    {f"mask2former_{b}_{task}": n for b in BACKBONES for task, n in MASK2FORMER_TASKS.items()}
    | {f"maskformer_{b}_ade20k": 150 for b in BACKBONES}
    | {f"maskformer_{b}_coco_panoptic": 133 for b in BACKBONES}
    | {"mask2former_r50_coco_instance_mp": 80}
    | dict.fromkeys(("detr_r50_panoptic", "detr_r50_dc5_panoptic", "detr_r101_panoptic"), 250)
    | {f"eomt_{s}_{task}": MASK2FORMER_TASKS[task] for s in EOMT_SIZES for task in EOMT_TASKS}
    | {f"eomt_dinov3_{s}_coco_panoptic": 133 for s in EOMT_SIZES}
    | dict.fromkeys(("per_pixel_baseline_r50_ade20k", "per_pixel_baseline_plus_r50_ade20k"), 150)
)
NUM_THINGS = {19: 8, 133: 80, 150: 100, 250: 92}
"""Number of classes of a panoptic model -> number of things; COCO's raw ids of things are below 92."""
PARAMETERS = {
    "mask2former_r50_coco_instance": 43_970_257,
    "mask2former_r50_coco_instance_mp": 43_970_257 + 80 * 256,  # an embedding of each class
    "mask2former_r101_coco_instance": 62_910_161,
    "mask2former_swin_tiny_coco_instance": 47_421_643,
    "mask2former_swin_small_coco_instance": 68_739_547,
    "mask2former_swin_base_coco_instance": 106_904_201,
    "mask2former_swin_large_coco_instance": 215_521_989,
    "mask2former_r50_coco_panoptic": 43_983_878,
    "mask2former_r101_coco_panoptic": 62_923_782,
    "mask2former_swin_tiny_coco_panoptic": 47_435_264,
    "mask2former_swin_small_coco_panoptic": 68_753_168,
    "mask2former_swin_base_coco_panoptic": 106_917_822,
    "mask2former_swin_large_coco_panoptic": 215_535_610,
    "mask2former_r50_ade20k_semantic": 43_988_247,
    "mask2former_r101_ade20k_semantic": 63_033_495,
    "mask2former_swin_tiny_ade20k_semantic": 47_439_633,
    "mask2former_swin_small_ade20k_semantic": 68_757_537,
    "mask2former_swin_base_ade20k_semantic": 106_922_191,
    "mask2former_swin_large_ade20k_semantic": 215_488_779,
    "mask2former_r50_ade20k_panoptic": 43_988_247,
    "mask2former_swin_large_ade20k_panoptic": 215_539_979,
    "mask2former_r50_ade20k_instance": 43_975_397,
    "mask2former_swin_large_ade20k_instance": 215_527_129,
    "mask2former_r50_cityscapes_semantic": 44_007_700,
    "mask2former_r101_cityscapes_semantic": 62_999_828,
    "mask2former_swin_tiny_cityscapes_semantic": 47_405_966,
    "mask2former_swin_small_cityscapes_semantic": 68_723_870,
    "mask2former_swin_base_cityscapes_semantic": 106_888_524,
    "mask2former_swin_large_cityscapes_semantic": 215_455_112,
    "mask2former_r50_cityscapes_panoptic": 44_007_700,
    "mask2former_r101_cityscapes_panoptic": 62_999_828,
    "mask2former_swin_tiny_cityscapes_panoptic": 47_405_966,
    "mask2former_swin_small_cityscapes_panoptic": 68_723_870,
    "mask2former_swin_base_cityscapes_panoptic": 106_888_524,
    "mask2former_swin_large_cityscapes_panoptic": 215_506_312,
    "mask2former_r50_cityscapes_instance": 44_004_873,
    "mask2former_r101_cityscapes_instance": 62_997_001,
    "mask2former_swin_tiny_cityscapes_instance": 47_403_139,
    "mask2former_swin_small_cityscapes_instance": 68_721_043,
    "mask2former_swin_base_cityscapes_instance": 106_885_697,
    "mask2former_swin_large_cityscapes_instance": 215_503_485,
    "maskformer_r50_ade20k": 41_254_743,
    "maskformer_r101_ade20k": 60_194_647,
    "maskformer_swin_tiny_ade20k": 41_757_009,
    "maskformer_swin_small_ade20k": 63_074_913,
    "maskformer_swin_base_ade20k": 101_829_391,
    "maskformer_swin_large_ade20k": 211_575_627,
    "maskformer_r50_coco_panoptic": 45_012_038,
    "maskformer_r101_coco_panoptic": 63_951_942,
    "maskformer_swin_tiny_coco_panoptic": 41_752_640,
    "maskformer_swin_small_coco_panoptic": 63_070_544,
    "maskformer_swin_base_coco_panoptic": 101_825_022,
    "maskformer_swin_large_coco_panoptic": 211_571_258,
    "per_pixel_baseline_r50_ade20k": 31_033_942,
    "per_pixel_baseline_plus_r50_ade20k": 41_228_736,
    "eomt_small_coco_panoptic": 23_975_942,
    "eomt_base_coco_panoptic": 93_663_110,
    "eomt_large_coco_panoptic": 316_695_686,
    "eomt_small_coco_instance": 23_955_537,
    "eomt_large_ade20k_semantic": 316_020_887,
    "eomt_dinov3_small_coco_panoptic": 23_356_934,
    "eomt_dinov3_large_coco_panoptic": 315_032_710,
    "detr_r50_panoptic": 42_899_288,
    "detr_r50_dc5_panoptic": 42_899_288,
    "detr_r101_panoptic": 61_839_192,
}
"""Counted from the original code (EoMT's from transformers), frozen ones included."""
FROZEN = ("detr_r50_panoptic", "detr_r50_dc5_panoptic", "detr_r101_panoptic")
METRIC = {"instance": "segm/AP", "semantic": "mIoU", "panoptic": "PQ"}


def test_there_is_a_config_for_every_backbone_and_task():
    assert NUM_CLASSES.keys() <= set(config_names())
    assert PARAMETERS.keys() <= NUM_CLASSES.keys()


@pytest.mark.parametrize("name", NUM_CLASSES)
def test_a_config_is_valid_and_its_parts_fit_together_and_have_the_originals_number_of_parameters(name):
    config = load_config(name)  # raises if a name or a type is wrong
    with torch.device("meta"):
        model = build_model(config["model"])  # a config knows its classes without data
    if name in PARAMETERS:
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    head = [v for k, v in model.named_parameters() if k.startswith(model.class_head) and k.endswith("weight")]
    assert len(head[0]) == NUM_CLASSES[name] + (not name.startswith("per_pixel"))  # a row for no object
    if "panoptic" in name:
        assert (len(model.things), sum(model.things)) == (NUM_CLASSES[name], NUM_THINGS[NUM_CLASSES[name]])
    CRITERIA.build(config["criterion"])
    optimizer = OPTIMIZERS.build(config["optimizer"], model=model)
    assert all(group["params"] for group in optimizer.param_groups)
    trained = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert config["train"]["best_metric"] == METRIC[model.tasks[0]]
    images_per_step = 8 * config["data"]["images_per_gpu"]
    assert images_per_step == config["train"]["reference_batch_size"]  # on 8 GPUs, as the first line says


@pytest.mark.parametrize("name", ["mask2former_dinov3_base_coco_instance", "mask2former_dinov3_base_ade20k_semantic"])
def test_config_with_a_timm_vit_fits_together(name):
    if not timm.is_model("vit_base_patch16_dinov3"):
        pytest.skip(f"timm {timm.__version__} has no DINOv3")
    config = load_config(name)
    with torch.device("meta"):
        model = build_model(config["model"], classes=["a", "b"])
    assert list(model.neck.feature_info) == ["mask_features", "res3", "res4", "res5"]
    optimizer = OPTIMIZERS.build(config["optimizer"], model=model)
    rates = {group["lr"] for group in optimizer.param_groups}
    assert max(rates) == config["optimizer"]["lr"] and min(rates) == pytest.approx(1e-4 * 0.8**13)


def decays(name):
    config = load_config(name)
    with torch.device("meta"):
        model = build_model(config["model"])
    names = {id(p): n for n, p in model.named_parameters()}
    groups = OPTIMIZERS.build(config["optimizer"], model=model).param_groups
    return {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


def test_norms_embeddings_and_position_tables_have_no_weight_decay():
    got = decays("mask2former_swin_tiny_coco_instance")
    without = (
        "backbone.patch_embed.norm.weight",
        "backbone.layers.0.blocks.0.norm1.bias",
        "backbone.norm3.weight",
        "neck.input_proj.0.1.weight",
        "neck.path.output.res2.1.bias",
        "head.query_feat.weight",
        "head.query_embed.weight",
        "head.level_embed.weight",
        "head.decoder_norm.bias",
    )
    assert {got[name][1] for name in without} == {0.0}
    assert got["backbone.layers.0.blocks.0.attn.relative_position_bias_table"] == (1e-5, 0.0)
    # The pixel decoder's level_embed is a bare parameter, and decays; so do the biases of layers other than norms.
    assert got["neck.level_embed"] == got["head.class_embed.bias"] == (1e-4, 0.05)
    assert got["backbone.patch_embed.proj.bias"] == (1e-5, 0.05)


def test_maskformer_on_swin_has_one_learning_rate():
    got = decays("maskformer_swin_tiny_ade20k")
    assert {lr for lr, _ in got.values()} == {6e-5} and {decay for _, decay in got.values()} == {0.0, 0.01}


def test_frozen_detr_trains_only_its_mask_head():
    for name in FROZEN:
        assert {n.split(".")[0] for n in decays(name)} == {"bbox_attention", "mask_head"}
