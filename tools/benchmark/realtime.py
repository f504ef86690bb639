"""Compare real-time detectors with transformers' at the images that they are made for; weights, images and targets are
random.

transformers' training step leaves out D-FINE's union of matchings, and computes half of its local terms: it does less.
The official code of D-FINE and RF-DETR gets its own row if `d_fine_project` or `rfdetr` can be imported, see README.md.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from torch import Tensor

from vitkit.configs import dfine, rf_detr, rtdetr
from vitkit.configs.dfine import dfine_model
from vitkit.tools.benchmark.models import (
    Case,
    Contestant,
    Family,
    RandomBatch,
    compare_family,
    import_transformers,
    vitkit_model,
)
from vitkit.tools.benchmark.timing import Measurement, Options

RESNETS = {
    18: dict(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512]),
    50: dict(layer_type="bottleneck", depths=[3, 4, 6, 3], hidden_sizes=[256, 512, 1024, 2048]),
}
"""Depth -> transformers' settings of the backbone."""
RT_DETRS = {
    18: dict(hidden_expansion=0.5, decoder_layers=3, freeze_backbone_batch_norms=False),
    50: dict(hidden_expansion=1.0, decoder_layers=6, freeze_backbone_batch_norms=True),
}
"""Depth -> transformers' settings of the neck and the decoder."""


HGNETV2_B0 = dict(
    stem_channels=[3, 16, 16],
    stage_in_channels=[16, 64, 256, 512],
    stage_mid_channels=[16, 32, 64, 128],
    stage_out_channels=[64, 256, 512, 1024],
    stage_num_blocks=[1, 1, 2, 1],
    stage_numb_of_layers=[3, 3, 3, 3],
)
"""transformers' settings of the backbone of D-FINE's sizes n and s."""


def transformers_rt_detr(depth: int, num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build transformers' RT-DETR with its loss on the batch, denoising included; its stem is frozen if vitkit's is."""
    transformers = import_transformers()
    backbone = transformers.RTDetrResNetConfig(**RESNETS[depth], out_indices=[2, 3, 4])
    config = transformers.RTDetrConfig(
        backbone_config=backbone,
        encoder_in_channels=RESNETS[depth]["hidden_sizes"][1:],
        num_labels=num_classes,
        **RT_DETRS[depth],
    )
    model = transformers.RTDetrForObjectDetection(config)
    for name, parameter in model.named_parameters():
        if ".embedder." in name and rtdetr.config(depth)["model"]["backbone"]["frozen_stem"]:
            parameter.requires_grad_(False)
    return contestant(model, batch)


def transformers_dfine(size: str, num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build transformers' D-FINE with its loss on the batch, denoising included."""
    transformers = import_transformers()
    model = dfine_model(size)
    neck, head, levels = model["neck"], model["head"], len(model["backbone"]["out_features"])
    backbone = transformers.HGNetV2Config(
        **HGNETV2_B0, depths=HGNETV2_B0["stage_num_blocks"], hidden_sizes=HGNETV2_B0["stage_out_channels"],
        out_indices=[2, 3, 4][-levels:], use_learnable_affine_block=True,
    )  # fmt: skip
    config = transformers.DFineConfig(
        backbone_config=backbone, freeze_backbone_batch_norms=False, num_labels=num_classes,
        encoder_hidden_dim=neck["out_channels"], encoder_in_channels=HGNETV2_B0["stage_out_channels"][-levels:],
        feat_strides=[8, 16, 32][-levels:], encoder_ffn_dim=neck["d_ffn"], encode_proj_layers=[levels - 1],
        hidden_expansion=neck["expansion"], depth_mult=neck["num_blocks"] / 3, d_model=head["d_model"],
        decoder_in_channels=[neck["out_channels"]] * levels, decoder_ffn_dim=head["d_ffn"], num_feature_levels=levels,
        decoder_n_points=head["num_points"], decoder_layers=head["num_decoder_layers"], reg_scale=head["reg_scale"],
    )  # fmt: skip
    return contestant(transformers.DFineForObjectDetection(config), batch)


def transformers_rf_detr(config: Callable[[], dict], num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build transformers' RF-DETR with its loss on the batch, in 13 groups of queries; `config` is vitkit's."""
    transformers = import_transformers()
    ours = config()["model"]
    vit, head = ours["backbone"], ours["head"]
    backbone = transformers.RfDetrDinov2Config(
        hidden_size=vit["d_model"], num_attention_heads=vit["num_heads"], image_size=vit["image_size"],
        patch_size=vit["patch_size"], num_windows=vit["num_windows"],
        out_features=[name.replace("block", "stage") for name in vit["out_features"]],
    )  # fmt: skip
    model = transformers.RfDetrForObjectDetection(
        transformers.RfDetrConfig(
            backbone_config=backbone, decoder_n_points=head["num_points"], decoder_layers=head["num_decoder_layers"],
            num_queries=ours["num_queries"], group_detr=ours["training_queries"][0]["groups"], num_labels=num_classes,
            dropout=0.0, layer_norm_eps=1e-6,
        )
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.endswith("mask_token"):  # used only in DINOv2's pre-training
            parameter.requires_grad_(False)
    return contestant(model, batch)


def official_dfine(size: str, num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build the authors' D-FINE with its loss on the batch, for inference in its deployed form."""
    from d_fine_project.nn.backbone.hgnetv2 import HGNetv2
    from d_fine_project.zoo.dfine import dfine, dfine_criterion, dfine_decoder, hybrid_encoder, matcher

    model = dfine_model(size)
    neck, head, levels = model["neck"], model["head"], len(model["backbone"]["out_features"])
    shared = dict(feat_strides=[8, 16, 32][-levels:], eval_spatial_size=[case.height, case.width])
    model = dfine.DFINE(
        HGNetv2(
            "B0", use_lab=True, return_idx=[1, 2, 3][-levels:], freeze_at=-1, freeze_norm=False, pretrained=False
        ),
        hybrid_encoder.HybridEncoder(
            in_channels=HGNETV2_B0["stage_out_channels"][-levels:], hidden_dim=neck["out_channels"],
            dim_feedforward=neck["d_ffn"], use_encoder_idx=[levels - 1], expansion=neck["expansion"],
            depth_mult=neck["num_blocks"] / 3, **shared,
        ),
        dfine_decoder.DFINETransformer(
            num_classes=num_classes, hidden_dim=head["d_model"], feat_channels=[neck["out_channels"]] * levels,
            num_levels=levels, num_points=head["num_points"], num_layers=head["num_decoder_layers"],
            dim_feedforward=head["d_ffn"], reg_scale=head["reg_scale"], **shared,
        ),
    )  # fmt: skip
    criterion = dfine_criterion.DFINECriterion(
        matcher.HungarianMatcher(dict(cost_class=2, cost_bbox=5, cost_giou=2), use_focal_loss=True),
        weight_dict=dict(loss_vfl=1, loss_bbox=5, loss_giou=2, loss_fgl=0.15, loss_ddf=1.5),
        losses=["vfl", "boxes", "local"], alpha=0.75, gamma=2.0, num_classes=num_classes,
    )  # fmt: skip
    targets = official_targets(batch)

    def loss() -> Tensor:
        return sum(criterion(model(batch.images, targets), targets).values())

    return Contestant(model if case.training else model.deploy(), loss, lambda: model(batch.images))


def official_rf_detr(num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build the authors' RF-DETR-N with its loss on the batch, in 13 groups of queries."""
    from rfdetr.config import RFDETRNanoConfig, TrainConfig
    from rfdetr.models import lwdetr

    config = RFDETRNanoConfig(pretrain_weights=None, device="cpu", num_classes=num_classes - 1)
    model = lwdetr.build_model_from_config(config)
    criterion, _ = lwdetr.build_criterion_from_config(config, TrainConfig(dataset_dir=".", output_dir="."))
    targets = official_targets(batch)

    def loss() -> Tensor:
        losses = criterion(model(batch.images, targets), targets)
        return sum(weight * losses[name] for name, weight in criterion.weight_dict.items() if name in losses)

    return Contestant(model, loss, lambda: model(batch.images))


def official_targets(batch: RandomBatch) -> list[dict[str, Tensor]]:
    """Return the targets by the names of the official code."""
    return [dict(labels=labels, boxes=boxes) for labels, boxes in zip(batch.labels, batch.boxes_cxcywh)]


def contestant(model, batch: RandomBatch) -> Contestant:
    """Return a detector of transformers with its loss on the batch."""
    targets = [dict(class_labels=labels, boxes=boxes) for labels, boxes in zip(batch.labels, batch.boxes_cxcywh)]

    def loss() -> Tensor:
        return model(batch.images, labels=targets).loss

    return Contestant(model, loss, lambda: model(batch.images))


def family(
    name: str,
    theirs: Callable[..., Contestant],
    config: Callable[[], dict],
    *,
    side: int = 640,
    num_classes: int = 80,
    package: str | None = None,
    official: Callable[..., Contestant] | None = None,
) -> Family:
    """Return a model's implementations, with the published size of images.

    Args:
        theirs, official: make transformers' model, and the authors' if their `package` can be imported.
        config: makes vitkit's config.
    """
    builders = {f"transformers {name}": theirs, f"vitkit {name}": partial(vitkit_model, config, is_padded=False)}
    if package is not None and find_spec(package) is not None:
        builders[f"official {name}"] = official
    return Family(
        builders,
        num_classes=num_classes,
        clip_grad_norm=0.1,
        cases=(Case(side, side), Case(side, side, batch_size=4, training=True)),
    )


def dfine_family(size: str, config: Callable[[], dict]) -> Family:
    """Return D-FINE's implementations."""
    theirs, official = partial(transformers_dfine, size), partial(official_dfine, size)
    return family(f"D-FINE-{size.upper()}", theirs, config, package="d_fine_project", official=official)


def rf_detr_family(name: str, config: Callable[[], dict]) -> Family:
    """Return RF-DETR's implementations, with the size of images that the config is made for."""
    side = config()["model"]["backbone"]["image_size"]
    theirs = partial(transformers_rf_detr, config)
    return family(name, theirs, config, side=side, num_classes=91, package="rfdetr", official=official_rf_detr)


FAMILIES = {
    "rtdetr_r18": family("RT-DETR-R18", partial(transformers_rt_detr, 18), partial(rtdetr.config, 18)),
    "rtdetr_r50": family("RT-DETR-R50", partial(transformers_rt_detr, 50), partial(rtdetr.config, 50)),
    "dfine_n": dfine_family("n", partial(dfine.config, "n")),
    "dfine_s": dfine_family("s", partial(dfine.config, "s")),
    "rf_detr_n": rf_detr_family("RF-DETR-N", partial(rf_detr.config, "n")),
}


def measure(part: str, options: Options) -> list[Measurement]:
    """Measure all contestants of a family on each case; see `models`."""
    families = {name: family for name, family in FAMILIES.items() if name.startswith(part)}
    return [
        row
        for name, family in families.items()
        for case in family.cases
        for row in compare_family(family, case, options, what=f"{name}, {case}")
    ]
