"""Compare real-time detectors with transformers' at the images that they are made for; weights, images and targets are
random.

transformers' training step leaves out D-FINE's union of matchings, and computes half of its local terms: it does less.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from vitkit.configs import dfine_n_coco, dfine_s_coco, rf_detr_n_coco, rtdetr_r18, rtdetr_r50
from vitkit.configs.parts.dfine import dfine_model
from vitkit.tools.benchmark.models import (
    Batch,
    Case,
    Contestant,
    Family,
    compare_family,
    import_transformers,
    vitkit_model,
)
from vitkit.tools.benchmark.timing import Options, Row

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


def transformers_rt_detr(depth: int, num_classes: int, batch: Batch, case: Case) -> Contestant:
    """Build transformers' RT-DETR with its loss on the batch, denoising included."""
    transformers = import_transformers()
    backbone = transformers.RTDetrResNetConfig(**RESNETS[depth], out_indices=[2, 3, 4])
    config = transformers.RTDetrConfig(
        backbone_config=backbone,
        encoder_in_channels=RESNETS[depth]["hidden_sizes"][1:],
        num_labels=num_classes,
        **RT_DETRS[depth],
    )
    return contestant(transformers.RTDetrForObjectDetection(config), batch)


def transformers_dfine(size: str, num_classes: int, batch: Batch, case: Case) -> Contestant:
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


def transformers_rf_detr(config: Callable[[], dict], num_classes: int, batch: Batch, case: Case) -> Contestant:
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


def contestant(model, batch: Batch) -> Contestant:
    """Return a detector of transformers with its loss on the batch."""
    targets = [dict(class_labels=labels, boxes=boxes) for labels, boxes in zip(batch.labels, batch.boxes_cxcywh)]

    def loss() -> Tensor:
        return model(batch.images, labels=targets).loss

    return Contestant(model, loss, lambda: model(batch.images))


def family(
    name: str, theirs: Callable[..., Contestant], config: Callable[[], dict], *, side: int = 640, num_classes: int = 80
) -> Family:
    """Return a model's two implementations, with the published size of images."""
    return Family(
        {f"transformers {name}": theirs, f"vitkit {name}": partial(vitkit_model, config, is_padded=False)},
        num_classes=num_classes,
        clip_grad_norm=0.1,
        cases=(Case(side, side), Case(side, side, batch_size=4, training=True)),
    )


def rf_detr_family(name: str, config: Callable[[], dict]) -> Family:
    """Return RF-DETR's two implementations, with the size of images that the config is made for."""
    side = config()["model"]["backbone"]["image_size"]
    return family(name, partial(transformers_rf_detr, config), config, side=side, num_classes=91)


FAMILIES = {
    "rtdetr_r18": family("RT-DETR-R18", partial(transformers_rt_detr, 18), rtdetr_r18.config),
    "rtdetr_r50": family("RT-DETR-R50", partial(transformers_rt_detr, 50), rtdetr_r50.config),
    "dfine_n": family("D-FINE-N", partial(transformers_dfine, "n"), dfine_n_coco.config),
    "dfine_s": family("D-FINE-S", partial(transformers_dfine, "s"), dfine_s_coco.config),
    "rf_detr_n": rf_detr_family("RF-DETR-N", rf_detr_n_coco.config),
}


def measure(part: str, options: Options) -> list[Row]:
    """Measure all contestants of a family on each case; see `models`."""
    families = {name: family for name, family in FAMILIES.items() if name.startswith(part)}
    return [
        row
        for name, family in families.items()
        for case in family.cases
        for row in compare_family(family, case, options, what=f"{name}, {case}")
    ]
