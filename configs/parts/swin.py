"""Swin backbones (Liu et al. 2021, https://arxiv.org/abs/2103.14030) as used by MaskFormer and Mask2Former."""

_IMAGENET_22K = "https://github.com/SwinTransformer/storage/releases/download/v1.0.0"

BACKBONES = {
    "swin_tiny": dict(type="swin_tiny", pretrained=True),
    "swin_small": dict(type="swin_small", pretrained=True),
    "swin_base": dict(type="swin_base_384", pretrained=f"{_IMAGENET_22K}/swin_base_patch4_window12_384_22k.pth"),
    "swin_large": dict(type="swin_large_384", pretrained=f"{_IMAGENET_22K}/swin_large_patch4_window12_384_22k.pth"),
}
"""Tiny and small are pretrained on ImageNet-1k at 224 pixels, base and large on ImageNet-22k at 384."""


def with_swin(cfg, name):
    """Replace a config's backbone by this one; changes the config in place and returns it."""
    cfg["model"]["backbone"] = dict(**BACKBONES[name], drop_path=0.3)
    cfg["optimizer"]["no_weight_decay"].append("relative_position_bias_table")
    return cfg
