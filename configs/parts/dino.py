"""Plain ViTs trained without labels, through timm: DINOv2 (Oquab et al. 2023, https://arxiv.org/abs/2304.07193) and
DINOv3 (Siméoni et al. 2025, https://arxiv.org/abs/2508.10104).

Their weights are downloaded from timm's pages; DINOv3's have a separate license.
"""

_SIZES = ("small", "base", "large")
_DINOV2 = {
    # Patches of 14 pixels are resampled to 16, so that the strides of maps are powers of 2.
    f"dinov2_{size}": dict(type=f"timm/vit_{size}_patch14_reg4_dinov2.lvd142m", pretrained=True, patch_size=16)
    for size in _SIZES
}
_DINOV3 = {f"dinov3_{size}": dict(type=f"timm/vit_{size}_patch16_dinov3.lvd1689m", pretrained=True) for size in _SIZES}
PLAIN_VITS = _DINOV2 | _DINOV3
"""Name of a backbone, such as "dinov3_small" -> its spec."""


def with_plain_vit(cfg, backbone, strides=(4, 8, 16, 32), layer_decay=0.8):
    """Set a config's backbone, and insert a pyramid made from its only map in front of the neck; changes and returns
    it.

    The learning rate decreases from block to block (ViTDet, https://arxiv.org/abs/2203.16527); to freeze blocks
    instead, set model.backbone.frozen_stages to their number.
    """
    model = cfg["model"]
    neck = {name: value for name, value in model["neck"].items() if name != "in_features"}
    model["backbone"] = dict(backbone, drop_path=0.1)
    model["neck"] = dict(type="SimpleFeaturePyramid", out_channels=256, strides=list(strides), neck=neck)
    cfg["optimizer"].update(backbone_lr=None, layer_decay=layer_decay, weight_decay=0.05)
    cfg["train"]["precision"] = "bf16"
    return cfg
