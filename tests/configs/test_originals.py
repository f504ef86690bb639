"""Every key of the originals' merged configs of the real-time detectors beside ours; the table is configs/originals.md.

originals.json has the keys as their files, with all included ones, or their classes' defaults give them. Each key is a
setting of ours, a constant of our code, a difference with its reason, or concerns only how a run is carried out.
After a change on purpose: python tests/configs/test_originals.py
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import vitkit.configs
from vitkit.config import Config, load_config
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD

ORIGINALS = json.loads(Path(__file__).with_name("originals.json").read_text(encoding="utf-8"))
TABLE = Path(vitkit.configs.__path__[0]) / "originals.md"
ABSENT = "absent"


class Setting(NamedTuple):
    """A key that a config of ours also has."""

    here: str
    value: Callable[[Config], Any]
    """Return the value in our config in the original's terms."""


class Constant(NamedTuple):
    """A key whose value is fixed in our code, or follows from others."""

    here: str
    values: tuple[Any, ...]


class Difference(NamedTuple):
    """A key whose value or effect differs here."""

    reason: str


def at(path: str, default: Any = None) -> Setting:
    """Return the setting with the same value at a path of the config, with what a missing one means."""

    def value(config: Config) -> Any:
        for name in path.split("."):
            config = config[int(name)] if isinstance(config, list) else config.get(name, default)
        return config

    return Setting(path, value)


def composed(config: Config) -> list[dict]:
    """Return the strong augmentation of a recipe as the originals name it, without resizing and tensors."""
    by_epoch = config["data"]["train"]["transforms"]["transforms"]
    mosaic = next((part for part in by_epoch if part["type"] == "GridMosaic"), None)
    strong = mosaic["otherwise"] if mosaic else by_epoch[0]
    colors, zoom, crop, flip = strong["transforms"]
    assert [part["type"] for part in strong["transforms"]] == [
        "PhotometricDistort", "RandomZoomOut", "RandomIoUCrop", "HorizontalFlip",
    ]  # fmt: skip
    assert zoom["p"] == flip["p"] == 0.5
    ops = [
        dict(type="RandomPhotometricDistort", p=colors["p_each"]),
        dict(type="RandomZoomOut", fill=zoom["fill"]),
        dict(type="RandomIoUCrop", p=crop["p"]),
        dict(type="Sanitize", min_size=strong["min_box_side"]),
        dict(type="RandomHorizontalFlip"),
        # After the resizing; boxes below a single pixel are not removed once more.
        dict(type="Sanitize", min_size=config["data"]["squares"].get("min_box_side", 1.0)),
    ]
    if mosaic:
        numbers = dict(rotation_range=mosaic["rotation"], translation_range=[mosaic["translation"]] * 2)
        ops.insert(0, dict(type="Mosaic", output_size=mosaic["tile"], scaling_range=mosaic["scale"], **numbers))
    return ops


def their_ops(ops: list[dict]) -> list[dict]:
    """Return the original's augmentation without resizing, conversion, and how mosaics are cached."""
    kept = []
    for op in ops:
        name = re.sub("^SanitizeBoundingBox(es)?$", "Sanitize", op["type"])
        if name not in (
            "Resize",
            "Normalize",
            "ConvertPILImage",
            "ConvertBoxes",
            "ConvertBox",
            "ToImageTensor",
            "ConvertDtype",
        ):
            drop = {"probability", "fill_value", "use_cache", "max_cached_images", "random_pop"}
            kept.append({key: value for key, value in op.items() if key not in drop} | dict(type=name))
    return kept


def until_epochs(config: Config) -> Any:
    epochs = config["data"]["train"]["transforms"]["until_epochs"]
    return epochs if len(epochs) > 1 else epochs[0]


def repeats(config: Config) -> int | None:
    count = config["data"]["squares"]["sizes"].count(640)
    return count if len(config["data"]["squares"]["sizes"]) > 1 else None


def squares(config: Config) -> list[int] | None:
    sizes = sorted(config["data"]["squares"]["sizes"])
    return sizes if len(sizes) > 1 else None


def their_rates(groups: list[dict]) -> list[float]:
    return sorted({group["lr"] for group in groups if "lr" in group})


def levels(config: Config) -> int:
    return len(config["model"]["backbone"]["out_features"])


WIDTHS = {
    "hgnetv2_b0": [256, 512, 1024], "hgnetv2_b2": [384, 768, 1536], "hgnetv2_b4": [512, 1024, 2048],
    "hgnetv2_b5": [512, 1024, 2048], 18: [128, 256, 512], 34: [128, 256, 512], 50: [512, 1024, 2048],
    101: [512, 1024, 2048],
}  # fmt: skip
"""Backbone -> the channels of its last three maps."""


def widths(config: Config) -> list[int]:
    backbone = config["model"]["backbone"]
    return WIDTHS[backbone["depth"] if "depth" in backbone else backbone["name"]][-levels(config) :]


def depth_mult(config: Config) -> float:
    return {1: 0.34, 2: 0.5, 3: 1.0}[config["model"]["neck"]["num_blocks"]]


def eval_ops(config: Config) -> list[dict]:
    """Return the preparation of DEIMv2's images as the original names it; the model normalizes them here."""
    ops = [dict(type="Resize", size=config["data"]["val"]["transforms"]["size"])]
    ops.append(dict(type="ConvertPILImage", dtype="float32", scale=True))
    if "pixel_mean" not in config["model"]["backbone"]:
        ops.append(dict(type="Normalize", mean=list(IMAGENET_MEAN), std=list(IMAGENET_STD)))
    return ops


def hgnet_name(config: Config) -> str:
    backbone = config["model"]["backbone"]
    if "size" in backbone:
        return backbone["size"].capitalize()
    return "Pico" if backbone["out_features"] == ["res4"] else backbone["name"].removeprefix("hgnetv2_").upper()


def batch_setting(section: str, key: str, default: Any) -> Setting:
    """Return the setting with the same value in a section of the data, or the one of sizes without the section."""
    return Setting(f"data.{section}.{key}", lambda c: c["data"].get(section, {key: default})[key])


def batch_epochs(section: str) -> Setting:
    def value(config: Config) -> list[int]:
        found = config["data"].get(section)
        return [40000, 15000] if found is None else [found["from_epoch"], found["until_epoch"]]

    return Setting(f"data.{section}", value)


def points(config: Config) -> int:
    return len(config["model"]["head"]["num_points"])


RUN = re.compile(
    r"(task|remap_mscoco_category|print_freq|output_dir|checkpoint_freq|find_unused_parameters|use_wandb|project_name|"
    r"exp_name|.*\.num_workers|.*\.(img_folder|ann_file)|.*_dataloader\.(type|shuffle|drop_last)|"
    r".*\.(dataset|transforms|collate_fn)\.type|.*\.collate_fn|scaler\..*|val_dataloader\.(total_)?batch_size|"
    r"(sync_bn|model|criterion|postprocessor|use_focal_loss)|(DFINE|DEIM|RTDETR)\.(backbone|encoder|decoder)|"
    r"backbone\.local_model_dir|train_dataloader\.dataset\.transforms\.policy\.name|.*\.return_masks|"
    r"model\.(amp|compile|cuda_graphs|fused_optimizer|device|license|model_name|gradient_checkpointing)|"
    r"train\.(resume|checkpoint_interval|dataset_file|dataset_dir|output_dir|progress_bar|tensorboard|wandb|mlflow|"
    r"clearml|project|run|class_names|run_test|eval_interval|log_per_class_metrics|eval_backend|save_dataset_grids|"
    r"notes|accelerator|seed|sync_bn|strategy|devices|num_nodes|lr_scheduler_(kwargs|interval|monitor)|"
    r"optimizer_kwargs|dont_save_weights|train_log_.*|compact_train_metrics|compute_.*|num_sanity_val_steps|"
    r"pin_memory|persistent_workers|prefetch_factor|pack_targets|num_workers|auto_batch_.*|pad_targets_to|"
    r"eval_batch_size|fp16_eval|eval_base_model|eval_ema_only|early_stopping.*|skip_best_epochs|smooth_alpha|"
    r"ema_update_interval|eval_masks_head_resolution))"
)
"""Keys of how a run is carried out: paths, logs, workers, processes, names of classes."""

KEYS: dict[str, Setting | Constant | Difference] = {
    "evaluator.type": at("evaluator.type"),
    "evaluator.iou_types": at("evaluator.iou_types"),
    "num_classes": Constant("the dataset's classes", (80,)),
    "train_dataloader.dataset.transforms.ops": Setting("data.train.transforms", composed),
    "train_dataloader.dataset.transforms.policy.epoch": Setting("data.train.transforms.until_epochs", until_epochs),
    "train_dataloader.dataset.transforms.policy.ops": Constant(
        "data.train.transforms: what stops",
        (
            ["RandomPhotometricDistort", "RandomZoomOut", "RandomIoUCrop"],
            ["Mosaic", "RandomPhotometricDistort", "RandomZoomOut", "RandomIoUCrop"],
        ),
    ),
    "train_dataloader.dataset.transforms.mosaic_prob": at("data.train.transforms.transforms.1.probability"),
    "train_dataloader.collate_fn.base_size": Setting(
        "data.squares", lambda c: c["data"]["val"]["transforms"]["size"][0]
    ),
    "train_dataloader.collate_fn.base_size_repeat": Setting("data.squares.sizes: how often 640", repeats),
    "train_dataloader.collate_fn.scales": Setting("data.squares.sizes", squares),
    "train_dataloader.collate_fn.stop_epoch": at("train.restart_epoch"),
    "rtdetrv2:train_dataloader.collate_fn.stop_epoch": Setting(
        "data.squares.until_epoch; R18 has one size", lambda c: c["data"]["squares"].get("until_epoch", 71)
    ),
    "train_dataloader.collate_fn.ema_restart_decay": at("train.restart_ema_decay"),
    "train_dataloader.collate_fn.mixup_prob": at("data.mixup.probability"),
    "train_dataloader.collate_fn.mixup_epochs": Setting(
        "data.mixup", lambda c: [c["data"]["mixup"]["from_epoch"], c["data"]["mixup"]["until_epoch"]]
    ),
    "train_dataloader.total_batch_size": at("train.reference_batch_size"),
    "train_dataloader.batch_size": at("data.images_per_gpu"),
    "val_dataloader.dataset.transforms.ops": Constant(
        "data.val.transforms: 640x640",
        tuple(
            [dict(type="Resize", size=[640, 640]), *rest]
            for rest in (
                [dict(type="ConvertPILImage", dtype="float32", scale=True)],
                [dict(type="ToImageTensor"), dict(type="ConvertDtype")],
            )
        ),
    ),
    "use_amp": Setting("train.precision", lambda c: c["train"].get("precision", "fp32") != "fp32"),
    "use_ema": Setting("train.ema_decay", lambda c: c["train"]["ema_decay"] is not None),
    "ema.type": Constant("train.ema_decay", ("ModelEMA",)),
    "ema.decay": at("train.ema_decay"),
    "ema.warmups": at("train.ema_ramp_steps"),
    "ema.start": Constant("from the first step", (0,)),
    "epochs": at("train.epochs"),
    "clip_max_norm": at("train.clip_grad_norm"),
    "optimizer.type": at("optimizer.type"),
    "optimizer.params": Setting(
        "optimizer.backbone_lr, no_weight_decay, lr_multipliers",
        lambda c: [] if c["optimizer"]["backbone_lr"] is None else [c["optimizer"]["backbone_lr"]],
    ),
    "optimizer.lr": at("optimizer.lr"),
    "optimizer.betas": Constant("AdamW's default", ([0.9, 0.999],)),
    "optimizer.weight_decay": at("optimizer.weight_decay"),
    "lr_scheduler.type": Constant("schedule.type: ConstantLR", ("MultiStepLR",)),
    "lr_scheduler.milestones": Constant("none is reached", ([500], [1000])),
    "lr_scheduler.gamma": Constant("none is reached", (0.1,)),
    "deim:lr_scheduler.type": Constant("lrsheduler takes its place", ("MultiStepLR",)),
    "lr_warmup_scheduler.type": Constant("linear", ("LinearWarmup",)),
    "lr_warmup_scheduler.warmup_duration": at("schedule.warmup_steps"),
    "deim:lr_warmup_scheduler.warmup_duration": Constant("warmup_iter takes its place", (500,)),
    "lrsheduler": Constant("schedule.type: FlatCosineLR", ("flatcosine",)),
    "lr_gamma": at("schedule.end_factor"),
    "warmup_iter": at("schedule.warmup_steps"),
    "flat_epoch": Setting(
        "schedule.flat_until_epoch; N's rate stays",
        lambda c: 7800 if c["schedule"]["end_factor"] == 1 else c["schedule"]["flat_until_epoch"],
    ),
    "no_aug_epoch": Setting(
        "train.epochs less train.restart_epoch", lambda c: c["train"]["epochs"] - c["train"]["restart_epoch"]
    ),
    "eval_spatial_size": Constant("data.val.transforms: 640x640; positions for any size", ([640, 640],)),
    "model.multi_scale": Setting("data.squares.sizes", squares),
    "backbone.pretrained": Setting(
        "model.backbone.pretrained", lambda c: bool(c["model"]["backbone"].get("pretrained", True))
    ),
    "backbone.name": Setting(
        "model.backbone.name", lambda c: c["model"]["backbone"]["name"].removeprefix("hgnetv2_").upper()
    ),
    "backbone.depth": at("model.backbone.depth"),
    "backbone.variant": Constant("ResNetVD", ("d",)),
    "backbone.num_stages": Constant("ResNetVD", (4,)),
    "backbone.return_idx": Setting(
        "model.backbone.out_features", lambda c: [int(name[3:]) - 2 for name in c["model"]["backbone"]["out_features"]]
    ),
    "backbone.freeze_at": Setting(
        "model.backbone.frozen_stem", lambda c: 0 if c["model"]["backbone"].get("frozen_stem") else -1
    ),
    "backbone.freeze_norm": Setting(
        "model.backbone.norm", lambda c: c["model"]["backbone"].get("norm", "bn") == "frozen_bn"
    ),
    "backbone.freeze_stem_only": Constant("frozen_stem freezes no stage", (True, ABSENT)),
    "backbone.use_lab": Constant("the timm model has it in B0 and B2", (True, ABSENT)),
    "encoder.in_channels": Setting("follows from model.backbone", widths),
    "encoder.feat_strides": Setting("follows from model.backbone", lambda c: [8, 16, 32][-levels(c) :]),
    "encoder.hidden_dim": at("model.neck.out_channels"),
    "encoder.use_encoder_idx": Setting("the coarsest map", lambda c: [levels(c) - 1]),
    "encoder.num_encoder_layers": Constant("HybridEncoder, DFINEEncoder", (1,)),
    "encoder.nhead": at("model.neck.num_heads"),
    "encoder.dim_feedforward": at("model.neck.d_ffn"),
    "encoder.dropout": at("model.neck.dropout", 0.0),
    "encoder.enc_act": Constant("HybridEncoder, DFINEEncoder", ("gelu",)),
    "encoder.act": Constant("HybridEncoder, DFINEEncoder", ("silu",)),
    "encoder.pe_temperature": Constant("HybridEncoder", (10000,)),
    "encoder.eval_spatial_size": Constant("positions for any size", ([640, 640],)),
    "encoder.expansion": at("model.neck.expansion"),
    "encoder.depth_mult": Setting("model.neck.num_blocks: three times as many, rounded", depth_mult),
    "decoder.feat_channels": Setting(
        "model.neck.out_channels", lambda c: [c["model"]["neck"]["out_channels"]] * levels(c)
    ),
    "decoder.feat_strides": Setting("follows from model.backbone", lambda c: [8, 16, 32][-levels(c) :]),
    "decoder.hidden_dim": at("model.head.d_model"),
    "decoder.num_levels": Setting("follows from model.backbone", levels),
    "decoder.num_layers": at("model.head.num_decoder_layers"),
    "decoder.num_decoder_layers": at("model.head.num_decoder_layers"),
    "decoder.eval_idx": Constant("the last layer's outputs", (-1,)),
    "decoder.eval_spatial_size": Constant("anchors for any size", ([640, 640],)),
    "decoder.num_queries": at("model.num_queries"),
    "decoder.num_denoising": at("model.training_queries.0.num_queries"),
    "decoder.label_noise_ratio": at("model.training_queries.0.label_noise"),
    "decoder.box_noise_scale": at("model.training_queries.0.box_noise"),
    "decoder.reg_max": at("model.head.reg_max"),
    "decoder.reg_scale": at("model.head.reg_scale"),
    "decoder.layer_scale": Constant("all layers have one width", (1,)),
    "decoder.num_points": at("model.head.num_points"),
    "decoder.cross_attn_method": Constant("bilinear sampling", ("default",)),
    "decoder.query_select_method": Constant("the locations of the greatest logits", ("default",)),
    "decoder.dim_feedforward": Setting(
        "model.head.d_ffn", lambda c: 512 if c["model"]["head"]["d_ffn"] == 512 else ABSENT
    ),
    "decoder.activation": at("model.head.activation"),
    "decoder.mlp_act": at("model.head.activation"),
    "postprocessor.num_top_queries": Setting(
        "model.num_detections", lambda c: c["model"].get("num_detections", c["model"]["num_queries"])
    ),
    "criterion.weight_dict.loss_vfl": at("criterion.weights.labels"),
    "deim:criterion.weight_dict.loss_vfl": Constant("not among losses", (1,)),
    "criterion.weight_dict.loss_mal": at("criterion.weights.labels"),
    "criterion.weight_dict.loss_bbox": at("criterion.weights.l1"),
    "criterion.weight_dict.loss_giou": at("criterion.weights.giou"),
    "criterion.weight_dict.loss_fgl": at("criterion.weights.fgl"),
    "criterion.weight_dict.loss_ddf": at("criterion.weights.ddf"),
    "criterion.losses": Setting(
        "criterion.class_loss, type",
        lambda c: (
            [{"varifocal": "vfl", "mal": "mal"}[c["criterion"]["class_loss"]], "boxes"]
            + (["local"] if c["criterion"]["weights"].get("fgl") else [])
        ),
    ),
    "criterion.alpha": Constant("the class loss's default", (0.75,)),
    "criterion.gamma": Constant("the class loss's default: varifocal 2, mal 1.5", (2.0, 1.5)),
    "criterion.reg_max": at("model.head.reg_max"),
    "criterion.matcher.type": at("criterion.matcher.type"),
    "criterion.matcher.weight_dict.cost_class": at("criterion.matcher.cost_labels"),
    "criterion.matcher.weight_dict.cost_bbox": at("criterion.matcher.cost_l1"),
    "criterion.matcher.weight_dict.cost_giou": at("criterion.matcher.cost_giou"),
    "criterion.matcher.alpha": Constant("HungarianMatcher's focal cost", (0.25,)),
    "criterion.matcher.gamma": Constant("HungarianMatcher's focal cost", (2.0,)),
    "criterion.matcher.change_matcher": Constant("criterion.matcher.late", (True,)),
    "criterion.matcher.iou_order_alpha": at("criterion.matcher.late.power"),
    "criterion.matcher.matcher_change_epoch": at("criterion.matcher.late.epoch"),
    "criterion.use_uni_set": at("criterion.union", ABSENT),
    "deimv2:criterion.weight_dict.loss_fgl": Setting(
        "criterion.weights.fgl; 0 without local losses", lambda c: c["criterion"]["weights"]["fgl"] or 0.15
    ),
    "deimv2:criterion.weight_dict.loss_ddf": Setting(
        "criterion.weights.ddf; 0 without local losses", lambda c: c["criterion"]["weights"]["ddf"] or 1.5
    ),
    "deimv2:train_dataloader.collate_fn.mixup_prob": batch_setting("mixup", "probability", 0.0),
    "deimv2:train_dataloader.collate_fn.mixup_epochs": batch_epochs("mixup"),
    "train_dataloader.collate_fn.copyblend_prob": batch_setting("copy_blend", "probability", 0.0),
    "train_dataloader.collate_fn.copyblend_epochs": batch_epochs("copy_blend"),
    "train_dataloader.collate_fn.area_threshold": batch_setting("copy_blend", "min_area", 100),
    "train_dataloader.collate_fn.num_objects": batch_setting("copy_blend", "num_objects", 3),
    "train_dataloader.collate_fn.with_expand": Constant("data.copy_blend.margin", (True,)),
    "train_dataloader.collate_fn.expand_ratios": batch_setting("copy_blend", "margin", [0.1, 0.25]),
    "deimv2:val_dataloader.dataset.transforms.ops": Setting("data.val.transforms; model.backbone.pixel_mean", eval_ops),
    "deimv2:eval_spatial_size": at("data.val.transforms.size"),
    "deimv2:backbone.name": Setting("model.backbone", hgnet_name),
    "adapter.name": Constant("model.backbone.vit", ("vit_tiny", "vit_tinyplus", "dinov3_vits16", "dinov3_vits16plus")),
    "adapter.weights_path": Difference("model.backbone.pretrained: where the files are; DINOv3's are known by name"),
    "adapter.embed_dim": Setting(
        "model.backbone.vit.d_model, or by the name of DINOv3's", lambda c: c["model"]["backbone"]["vit"].get("d_model")
    ),
    "adapter.num_heads": Setting(
        "model.backbone.vit.num_heads, or by the name of DINOv3's",
        lambda c: c["model"]["backbone"]["vit"].get("num_heads"),
    ),
    "adapter.interaction_indexes": at("model.backbone.blocks"),
    "adapter.conv_inplane": at("model.backbone.channels"),
    "adapter.hidden_dim": at("model.backbone.out_channels"),
    "adapter.finetune": Constant("the transformer is trained", (True, ABSENT)),
    "deimv2:encoder.in_channels": Setting(
        "follows from model.backbone",
        lambda c: (
            {"Atto": [256], "Femto": [512], "Pico": [512], "B0": [512, 1024]}[hgnet_name(c)]
            if "vit" not in c["model"]["backbone"]
            else [c["model"]["backbone"].get("out_channels") or c["model"]["backbone"]["vit"]["d_model"]] * 3
        ),
    ),
    "deimv2:encoder.feat_strides": Setting(
        "follows from model.backbone",
        lambda c: [16] if c["model"]["neck"]["type"] == "LiteEncoder" else [8, 16, 32][-points(c) :],
    ),
    "deimv2:encoder.use_encoder_idx": Setting("the coarsest map", lambda c: [points(c) - 1]),
    "deimv2:encoder.nhead": at("model.neck.num_heads", 8),
    "deimv2:encoder.depth_mult": Setting(
        "model.neck.num_blocks: three times as many, rounded", lambda c: c["model"]["neck"]["num_blocks"] / 3
    ),
    "encoder.version": at("model.neck.block"),
    "encoder.csp_type": Constant("SplitCSPLayer", ("csp2",)),
    "encoder.fuse_op": Constant("DEIMv2Encoder", ("sum",)),
    "deimv2:decoder.feat_channels": Setting(
        "model.neck.out_channels", lambda c: [c["model"]["neck"]["out_channels"]] * points(c)
    ),
    "deimv2:decoder.feat_strides": Setting("follows from model.backbone", lambda c: [8, 16, 32][-points(c) :]),
    "deimv2:decoder.num_levels": Setting("follows from model.backbone", points),
    "deimv2:decoder.dim_feedforward": at("model.head.d_ffn"),
    "decoder.share_bbox_head": at("model.head.shared_box_head"),
    "decoder.use_gateway": Setting("model.head.gate", lambda c: ABSENT if c["model"]["head"]["gate"] else False),
    "deimv2:postprocessor.num_top_queries": Setting(
        "model.num_detections", lambda c: c["model"].get("num_detections", 300)
    ),
}
"""Key with the class's name as its part (backbone, encoder, decoder, criterion, postprocessor), of all or after a
family's name -> what it is here."""


def _keypoint_weight(name: str) -> Setting:
    return Setting(
        f"criterion.weights.keypoint_{name}, and criterion.matcher",
        lambda c: (
            c["criterion"]["weights"].get(f"keypoint_{name}", 0.0)
            * (c["criterion"]["matcher"].get(f"cost_keypoint_{name}", 1.0) == 1)
        ),
    )


RF_DETR_KEYS: dict[str, Setting | Constant | Difference] = {
    "model.encoder": Constant("WindowedViT, d_model 384", ("dinov2_windowed_small",)),
    "model.out_feature_indexes": Setting(
        "model.backbone.out_features", lambda c: [int(name[5:]) for name in c["model"]["backbone"]["out_features"]]
    ),
    "model.dec_layers": at("model.head.num_decoder_layers"),
    "model.two_stage": Constant("RFDETRHead", (True,)),
    "model.projector_scale": Constant("C2fProjection: one map of the patches' stride", (["P4"],)),
    "model.hidden_dim": at("model.head.d_model"),
    "model.patch_size": at("model.backbone.patch_size"),
    "model.num_windows": at("model.backbone.num_windows"),
    "model.sa_nheads": at("model.head.num_heads"),
    "model.ca_nheads": at("model.head.num_cross_heads"),
    "model.dec_n_points": at("model.head.num_points"),
    "model.num_queries": at("model.num_queries"),
    "model.num_select": at("model.num_detections"),
    "model.postprocess_trace_alpha": Setting(
        "model.score_uncertainty, with keypoints", lambda c: c["model"].get("score_uncertainty", 0.2)
    ),
    "model.bbox_reparam": Constant("RFDETRHead", (True,)),
    "model.lite_refpoint_refine": Constant("RFDETRHead", (True,)),
    "model.layer_norm": Constant("WindowedViT's maps are normalized", (True,)),
    "model.num_channels": Constant("model.backbone.in_channels", (3,)),
    "model.num_classes": Constant("the dataset's classes; 91 logits with the published weights", (90,)),
    "model.pretrain_weights": Difference(
        "model.backbone.pretrained: DINOv2's. The original's training starts from these detectors of COCO; "
        "--init rf_detr_n_coco does so here"
    ),
    "model.resolution": at("model.backbone.image_size"),
    "model.group_detr": at("model.training_queries.0.groups"),
    "model.positional_encoding_size": Setting(
        "model.backbone.image_size / patch_size",
        lambda c: c["model"]["backbone"]["image_size"] // c["model"]["backbone"]["patch_size"],
    ),
    "model.ia_bce_loss": Setting("criterion.class_loss", lambda c: c["criterion"]["class_loss"] == "iou_aware"),
    "model.segmentation_head": at("model.head.masks"),
    "model.use_grouppose_keypoints": Setting("model.num_keypoints", lambda c: "num_keypoints" in c["model"]),
    "model.keypoint_cross_attn": Constant("QueryKeypoints", (True,)),
    "model.inter_instance_kp_attn": Constant("QueryKeypoints", (False,)),
    "model.grouppose_keypoint_dim_downscale": Constant("QueryKeypoints", (1,)),
    "model.dual_projector": Setting("model.neck.type", lambda c: c["model"]["neck"]["type"] == "C2fProjectionPair"),
    "model.dual_projector_kp_only": Setting(
        "model.neck.type", lambda c: c["model"]["neck"]["type"] == "C2fProjectionPair"
    ),
    "model.num_keypoints_per_class": Setting(
        "model.num_keypoints", lambda c: [n] if (n := c["model"].get("num_keypoints")) else []
    ),
    "train.keypoint_flip_pairs": Constant("of the file's names", ([],)),
    "train.keypoint_l1_loss_coef": _keypoint_weight("l1"),
    "train.keypoint_findable_loss_coef": _keypoint_weight("findable"),
    "train.keypoint_visible_loss_coef": _keypoint_weight("visible"),
    "train.keypoint_nll_loss_coef": _keypoint_weight("nll"),
    "train.keypoint_oks_sigmas": Constant("COCO's", (None,)),
    "model.num_decoder_registers": Constant("RFDETRHead", (0,)),
    "model.mask_downsample_ratio": Constant("MaskHead", (4,)),
    "model.backbone_lora": Constant("none", (False,)),
    "model.freeze_encoder": Setting("optimizer.backbone_lr", lambda c: c["optimizer"]["backbone_lr"] == 0),
    "train.lr": at("optimizer.lr"),
    "train.lr_encoder": Setting(
        "optimizer.backbone_lr, of 0.7^2 * 0.8 times as much",
        lambda c: round(c["optimizer"]["backbone_lr"] / 0.7**2 / 0.8, 9),
    ),
    "train.batch_size": at("data.images_per_gpu"),
    "train.grad_accum_steps": Difference("train.reference_batch_size 16: four batches, as in its versions before 1.11"),
    "train.epochs": at("train.epochs"),
    "train.ema_decay": at("train.ema_decay"),
    "train.ema_tau": at("train.ema_ramp_steps"),
    "train.warmup_epochs": Setting("schedule", lambda c: float(c["schedule"].get("warmup_steps", 0))),
    "train.lr_vit_layer_decay": at("optimizer.layer_decay"),
    "train.lr_component_decay": Setting(
        "optimizer.lr_multipliers", lambda c: c["optimizer"]["lr_multipliers"]["head.decoder."]
    ),
    "train.drop_path": Setting("model.backbone.drop_path", lambda c: c["model"]["backbone"].get("drop_path", 0.0)),
    "train.cls_loss_coef": at("criterion.weights.labels"),
    "train.mask_point_sample_ratio": Setting(
        "criterion.pixels_per_point", lambda c: c["criterion"].get("pixels_per_point", ABSENT)
    ),
    "train.mask_ce_loss_coef": Setting(
        "criterion.weights.mask", lambda c: c["criterion"]["weights"].get("mask", ABSENT)
    ),
    "train.mask_dice_loss_coef": Setting(
        "criterion.weights.dice", lambda c: c["criterion"]["weights"].get("dice", ABSENT)
    ),
    "train.square_resize_div_64": Constant("data.squares", (True,)),
    "train.multi_scale": Setting(
        "data.squares.sizes", lambda c: "per-batch" if len(c["data"]["squares"]["sizes"]) > 1 else "off"
    ),
    "train.expanded_scales": Setting("eleven data.squares.sizes", lambda c: len(c["data"]["squares"]["sizes"]) == 11),
    "train.use_ema": Setting("train.ema_decay", lambda c: c["train"]["ema_decay"] is not None),
    "train.weight_decay": at("optimizer.weight_decay"),
    "train.amp_dtype": at("train.precision"),
    "train.best_model_metric": Constant("AP, by default", ("map",)),
    "train.eval_max_dets": at("evaluator.max_dets"),
    "train.aug_config": Constant("flips", (None,)),
    "train.scale_jitter": Constant("data.train.transforms: half of the images are cropped", (True,)),
    "train.augmentation_backend": Constant("albumentations, on the CPU", ("cpu",)),
    "train.clip_max_norm": at("train.clip_grad_norm"),
    "train.lr_scheduler": Constant("schedule.type: ConstantLR; the step is after the last epoch", ("step",)),
    "train.optimizer": Setting("optimizer.type", lambda c: c["optimizer"]["type"].lower()),
}

PARTS = {
    r"(HGNetv2|PResNet)\.": "backbone.", r"DINOv3STAs\.": "adapter.", r"(Hybrid|Lite)Encoder\.": "encoder.",
    r"criterion\.": "criterion.", r"((DFINE|DEIM)Transformer|RTDETRTransformer(v2)?)\.": "decoder.",
    r"(DFINE|RTDETR)?PostProcessor\.": "postprocessor.", r"RTDETR\.multi": "model.multi", r"epoches$": "epochs",
    r"(DFINECriterion|DEIMCriterion|SetCriterion|RTDETRCriterionv2)\.": "criterion.",
}  # fmt: skip


def part_of(key: str) -> str:
    """Return a key of the originals with the parts' names instead of their classes'."""
    for pattern, part in PARTS.items():
        key = re.sub(f"^{pattern}", part, key)
    return key


def entry(family: str, key: str) -> Setting | Constant | Difference | None:
    """Return what a key of a family is here; None: it concerns how a run is carried out."""
    if family == "rf_detr":
        return None if RUN.fullmatch(key) else RF_DETR_KEYS[key]
    name = part_of(key)
    if RUN.fullmatch(name):
        return None
    kin = {"deimv2": ["deimv2", "deim"]}.get(family, [family])
    return next((KEYS[f"{one}:{name}"] for one in kin if f"{one}:{name}" in KEYS), None) or KEYS[name]


_ALTERNATIVES = ("HGNetv2", "DINOv3STAs", "HybridEncoder", "LiteEncoder")


def is_used(family: str, key: str, number: int) -> bool:
    """Whether the config of a family with this number has the class that a key belongs to, where sizes differ in it."""
    owner = key.partition(".")[0]
    if family != "deimv2" or owner not in _ALTERNATIVES:
        return True
    return owner in [values(family, f"DEIM.{part}")[number] for part in ("backbone", "encoder")]


def values(family: str, key: str) -> list[Any]:
    """Return the original's value of each config of a family."""
    value, names = ORIGINALS[family]["keys"][key], ORIGINALS[family]["names"]
    return value["each"] if isinstance(value, dict) and "each" in value else [value] * len(names)


def cells() -> Iterator[tuple[str, str]]:
    for family, original in ORIGINALS.items():
        for key in original["keys"]:
            yield family, key


CONFIGS = {name: load_config(name) for original in ORIGINALS.values() for name in original["names"]}


@pytest.mark.parametrize("family", ORIGINALS)
def test_every_key_of_the_originals_is_the_same_here_or_explained(family):
    wrong = []
    for key in ORIGINALS[family]["keys"]:
        known = entry(family, key)
        for number, (name, theirs) in enumerate(zip(ORIGINALS[family]["names"], values(family, key), strict=True)):
            if not is_used(family, key, number):
                continue
            if isinstance(known, Constant) and theirs not in known.values:
                wrong.append(f"{name}: {key}: {theirs!r}, here {known.values!r}")
            if isinstance(known, Setting):
                adapt = {"optimizer.params": their_rates, "train_dataloader.dataset.transforms.ops": their_ops}
                theirs = adapt.get(key, lambda value: value)(theirs)
                ours = known.value(CONFIGS[name])
                same = ours == theirs or (key.endswith("Encoder.depth_mult") and round(3 * theirs) == round(3 * ours))
                same = same or (theirs == ABSENT and ours in (None, False))
                if not same:
                    wrong.append(f"{name}: {key}: {theirs!r}, here {ours!r}")
    assert not wrong, "\n".join(wrong)


def test_the_table_is_that_of_the_keys():
    assert TABLE.read_text(encoding="utf-8") == table()


def test_no_entry_is_left_over():
    used = {(f"{family}:{part_of(key)}", part_of(key)) for family, key in cells() if family != "rf_detr"}
    assert set(KEYS) <= {name for pair in used for name in pair}
    assert RF_DETR_KEYS.keys() <= ORIGINALS["rf_detr"]["keys"].keys()


def shown(family: str, key: str) -> str:
    """Return the original's values as text, once if they are equal."""
    texts = []
    for value in values(family, key):
        if key.endswith("transforms.ops"):
            value = [" ".join(str(part) for part in op.values()) for op in their_ops(value)] or "640x640"
        if key == "optimizer.params":
            value = [" ".join(str(part) for part in group.values()) for group in value]
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        texts.append(text.replace("|", "\\|"))
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def table() -> str:
    """Return configs/originals.md."""
    lines = [PREFACE]
    for family, original in ORIGINALS.items():
        lines += [f"## {', '.join(original['names'])}", "", f"{original['source']}.", ""]
        lines += ["| key there | there | here |", "|---|---|---|"]
        run = []
        for key in original["keys"]:
            known = entry(family, key)
            if known is None:
                run.append(f"`{key}`")
                continue
            here = f"differs: {known.reason}" if isinstance(known, Difference) else known.here
            there = shown(family, key)
            lines.append(f"| `{key}` | {f'`{there}`' if there else 'none'} | {here} |")
        lines += ["", f"How a run is carried out, not compared: {', '.join(run)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


PREFACE = """\
# The real-time detectors' configs beside the originals'

Each key of the originals' configs with all files that they include, for the names in each heading in that order (one
value: the same for all), and the key of ours that has the same value, or where the code has it.
`tests/configs/test_originals.py` compares the values and writes this page. What the patterns of the optimizers'
groups mean for single parameters is in `tests/configs/test_realtime.py` and `test_rtdetr.py`; denoising has the rules
of each original (`tests/training_queries/test_denoising_golden.py`), which are constants of their code.

What differs beyond these keys:

- **RT-DETR, D-FINE, DEIM and DEIMv2 on rectangles**: their encoders number positions column by column and tokens row
  by row, so that on any image that is not a square each token gets another one's position. Here, each has its own;
  squares are the same.
- **RF-DETR in padded batches**: the original codes a query's box relative to the padded image before its decoder;
  here, relative to the image itself, so that results do not depend on what else is in the batch. Logits of padded
  images differ by up to 0.66; without padding, as in its own training, they are the same. Its code has taken
  rectangles since 1.11; here they are padded to whole windows.
- **RT-DETR's norms within its projections** (`encoder.input_proj`, `decoder.enc_output`) have names without "norm" in
  its first version, so that they decay there; here, no norm does.
- **RF-DETR's optimizer**: see the head of [rf_detr.py](rf_detr.py).
- **RF-DETR's keypoints**: the original teaches objects without any labeled point that none of theirs can be found;
  here, such objects train their box and class alone. Its best weights are chosen by a smoothed metric.
- **The average of D-FINE, DEIM and DEIMv2** restarts once: see `training` in [parts/realtime.py](parts/realtime.py).
"""

if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
