"""DEIMv2 on COCO 2017 (Huang et al. 2025, https://arxiv.org/abs/2509.20787): DINOv3 or a small ViT with an adapter, or
HGNetV2, and a lighter decoder than D-FINE's.

Run:       torchrun --nproc-per-node 8 tools/train.py deimv2_s_coco
Reference: the original README; parameters are with 80 classes. Here: not yet run.
Licenses:  the weights of S, M, L and X are made from DINOv3: take them as under the DINOv3 License, although it is not
           settled whether they are. Those of the other sizes are under Apache-2.0.
Backbones: those of S and M are files of the original README, vitt_distill.pt and vittplus_distill.pt: set
           model.backbone.pretrained to where they are.
"""

from typing import Literal

from vitkit.configs.dfine import adamw, dfine_criterion
from vitkit.configs.parts.masks import with_masks
from vitkit.configs.parts.realtime import deim_data, flat_cosine, training

VARIANTS = {
    "deimv2_atto_coco": (dict(size="atto"), "23.8 box AP, 500 epochs; 508,983 parameters"),
    "deimv2_femto_coco": (dict(size="femto"), "31.0 box AP, 500 epochs; 983,943 parameters"),
    "deimv2_pico_coco": (dict(size="pico"), "38.5 box AP, 500 epochs; 1,539,537 parameters"),
    "deimv2_n_coco": (dict(size="n"), "43.0 box AP, 160 epochs; 3,600,419 parameters"),
    "deimv2_s_coco": (dict(size="s"), "50.9 box AP, 132 epochs; 9,779,836 parameters"),
    "deimv2_m_coco": (dict(size="m"), "53.0 box AP, 102 epochs; 18,357,748 parameters"),
    "deimv2_l_coco": (dict(size="l"), "56.0 box AP, 68 epochs; 32,546,220 parameters"),
    "deimv2_x_coco": (dict(size="x"), "57.8 box AP, 58 epochs; 51,206,742 parameters"),
    "deimv2_s_masks_coco": (dict(size="s", masks=True), "none published with masks; 10,307,645 parameters"),
}
"""Name -> arguments of `config`, and what is published. The originals count two settings as parameters, `up` and
`reg_scale`; in L and X also 4,992 zeros: biases of keys that a mask removes, and a token for masking."""

SIZES = ("atto", "femto", "pico", "n", "s", "m", "l", "x")
LITE = SIZES[:3]
IMAGE_SIZES = dict(atto=320, femto=416, pico=640, n=640, s=640, m=640, l=640, x=640)

ENCODERS = {
    "atto": dict(type="LiteEncoder", out_channels=64, block="dfine", num_blocks=2, expansion=0.34),
    "femto": dict(type="LiteEncoder", out_channels=96, block="dfine", num_blocks=2, expansion=0.34),
    "pico": dict(type="LiteEncoder", out_channels=112, block="dfine", num_blocks=2, expansion=0.34),
    "n": dict(type="DEIMv2Encoder", out_channels=128, d_ffn=512, block="dfine", num_blocks=2, expansion=0.34),
    "s": dict(type="DEIMv2Encoder", out_channels=192, d_ffn=512, block="deim", num_blocks=2, expansion=0.34),
    "m": dict(type="DEIMv2Encoder", out_channels=256, d_ffn=512, block="deim", num_blocks=3, expansion=0.67),
    "l": dict(type="DEIMv2Encoder", out_channels=224, d_ffn=896, block="deim", num_blocks=3, expansion=1.0),
    "x": dict(type="DEIMv2Encoder", out_channels=256, d_ffn=1024, block="deim", num_blocks=4, expansion=1.25),
}
"""Size -> the encoder."""

DECODERS = {
    "atto": dict(d_ffn=160, num_decoder_layers=3, num_points=[4, 2], gate=False, shared_box_head=True),
    "femto": dict(d_ffn=256, num_decoder_layers=3, num_points=[4, 2], gate=False, shared_box_head=True),
    "pico": dict(d_ffn=320, num_decoder_layers=3, num_points=[4, 2], gate=False, shared_box_head=True),
    "n": dict(d_ffn=512, num_decoder_layers=3, num_points=[6, 6], gate=True, shared_box_head=False),
    "s": dict(d_ffn=512, num_decoder_layers=4, num_points=[3, 6, 3], gate=True, shared_box_head=False),
    "m": dict(d_ffn=512, num_decoder_layers=4, num_points=[3, 6, 3], gate=True, shared_box_head=False),
    "l": dict(d_ffn=1792, num_decoder_layers=4, num_points=[3, 6, 3], gate=True, shared_box_head=False),
    "x": dict(d_ffn=2048, num_decoder_layers=6, num_points=[3, 6, 3], gate=True, shared_box_head=False),
}
"""Size -> the decoder's layers; its width is the encoder's."""

NUM_QUERIES = dict(atto=100, femto=150, pico=200, n=300, s=300, m=300, l=300, x=300)

TRAINING = {
    "atto": dict(lr=2e-3, backbone_lr=1e-3, weight_decay=1e-4, epochs=500, mosaic_until=250, strong_until=400),
    "femto": dict(lr=1.6e-3, backbone_lr=8e-4, weight_decay=1e-4, epochs=500, mosaic_until=250, strong_until=400),
    "pico": dict(lr=1.6e-3, backbone_lr=8e-4, weight_decay=1e-4, epochs=500, mosaic_until=250, strong_until=400),
    "n": dict(lr=8e-4, backbone_lr=4e-4, weight_decay=1e-4, epochs=160, mosaic_until=78, strong_until=148),
    "s": dict(lr=5e-4, backbone_lr=2.5e-5, weight_decay=1e-4, epochs=132, mosaic_until=64, strong_until=120),
    "m": dict(lr=5e-4, backbone_lr=2.5e-5, weight_decay=1e-4, epochs=102, mosaic_until=49, strong_until=90),
    "l": dict(lr=5e-4, backbone_lr=1.25e-5, weight_decay=1.25e-4, epochs=68, mosaic_until=34, strong_until=60),
    "x": dict(lr=5e-4, backbone_lr=1e-5, weight_decay=1.25e-4, epochs=58, mosaic_until=29, strong_until=50),
}
"""Size -> the optimizer's settings, and the epochs of `deim_data`."""

AUGMENTATION = {
    "atto": dict(mosaic=0.3, mixup=0.0, min_box_side=12.0),
    "femto": dict(mosaic=0.5, mixup=0.0, min_box_side=10.0),
    "pico": dict(mosaic=0.5, mixup=0.0, min_box_side=8.0),
    "n": dict(copy_blend=0.4, copy_blend_until=78),
    "s": dict(copy_blend=0.5, copy_blend_until=120, size_repeats=20),
    "m": dict(copy_blend=0.5, copy_blend_until=90, size_repeats=6),
    "l": dict(copy_blend=0.5, copy_blend_until=60, size_repeats=3),
    "x": dict(copy_blend=0.5, copy_blend_until=50, size_repeats=3),
}
"""Size -> what differs in `deim_data`."""

LATE_MATCHING = dict(atto=450, femto=450, pico=450, n=136, s=100, m=80, l=50, x=45)
"""Size -> the epoch from which on queries are matched by class probability and IoU alone."""

BATCH_SIZE = dict(atto=128, femto=128, pico=128, n=32, s=32, m=32, l=32, x=32)
_B0 = "https://github.com/Peterande/storage/releases/download/dfinev1.0/PPHGNetV2_B0_stage1.pth"


def config(size: Literal["atto", "femto", "pico", "n", "s", "m", "l", "x"] = "s", masks: bool = False):
    of_size = TRAINING[size]
    mosaic_until, strong_until = of_size["mosaic_until"], of_size["strong_until"]
    # The smallest sizes go on in squares of one size, without augmentation, before the restart.
    restart_epoch = 468 if size in LITE else strong_until
    warmup_steps = 4000 if size in LITE else 2000
    schedule = flat_cosine(mosaic_until, restart_epoch, warmup_steps)
    cfg = dict(
        model=deimv2_model(size),
        criterion=deimv2_criterion(size),
        data=deim_data(4, mosaic_until, strong_until, size=IMAGE_SIZES[size], **AUGMENTATION[size]),
        optimizer=adamw(of_size, _no_weight_decay(size)) | _adapter_rates(size),
        schedule=schedule | dict(end_factor=1.0) if size == "n" else schedule,  # N's rate stays
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"]),
        train=training(of_size["epochs"], restart_epoch, batch_size=BATCH_SIZE[size]),
    )
    return with_masks(cfg) if masks else cfg


def deimv2_model(size):
    encoder = ENCODERS[size]
    return dict(
        type="DEIMv2", num_queries=NUM_QUERIES[size],
        backbone=backbone(size),
        neck=encoder,
        head=dict(
            type="DEIMv2Head", d_model=encoder["out_channels"], num_heads=8, dropout=0.0, activation="silu", reg_max=32,
            reg_scale=4.0, up=0.5, **DECODERS[size],
        ),
        training_queries=[
            dict(
                type="BoxDenoising", num_queries=100, contrastive=True, label_noise=0.5, box_noise=1.0, mirror=True,
                eps=1e-5, padding=0.0,
            ),
        ],
    )  # fmt: skip


def backbone(size):
    """HGNetV2 without normalization of its images, or a plain transformer with an adapter."""
    raw = dict(pretrained=_B0, pixel_mean=[0.0, 0.0, 0.0], pixel_std=[1.0, 1.0, 1.0])
    if size in ("atto", "femto"):
        return dict(type="SmallHGNetV2", size=size, out_features=["res4"], **raw)
    if size in ("pico", "n"):
        features = ["res4"] if size == "pico" else ["res4", "res5"]
        return dict(type="TimmBackbone", name="hgnetv2_b0", out_features=features, **raw)
    if size in ("s", "m"):
        width = dict(d_model=192, num_heads=3) if size == "s" else dict(d_model=256, num_heads=4)
        return dict(
            type="SpatialAdapter", vit=dict(type="ViT", positions="rotary", **width), blocks=[3, 7, 11], channels=16,
            norm=False, pretrained="vitt_distill.pt" if size == "s" else "vittplus_distill.pt",
        )  # fmt: skip
    vit = "vit_small_patch16_dinov3_qkvb" if size == "l" else "vit_small_plus_patch16_dinov3_qkvb"
    return dict(
        type="SpatialAdapter", vit=dict(type=vit, rotary_rescale=2.0), blocks=[5, 8, 11],
        channels=32 if size == "l" else 64, out_channels=ENCODERS[size]["out_channels"], norm=True, pretrained=True,
    )  # fmt: skip


def deimv2_criterion(size):
    criterion = dfine_criterion("mal")
    criterion["matcher"]["late"] = dict(epoch=LATE_MATCHING[size], power=4.0)
    if size in LITE:  # the distributions have no losses of their own
        criterion |= dict(union=False, weights=criterion["weights"] | dict(fgl=0.0, ddf=0.0))
    return criterion


def _no_weight_decay(size):
    # By their names, the originals also decay the biases of the adapter's last norms, and the scales of the norms
    # after the smallest encoder's pooling.
    if size in ("s", "m", "l", "x"):
        return ["backbone.vit.norms", "neck.norms", "head.norms", "bias"]
    return ["neck.norms", "head.norms"] if size == "atto" else ["neck.vectors", "head.vectors"]


def _adapter_rates(size):
    """Only the transformer has the backbone's rate."""
    in_adapter = size in ("s", "m", "l", "x")
    return dict(lr_multipliers={"backbone.detail.": 1.0, "backbone.projections.": 1.0}) if in_adapter else {}
