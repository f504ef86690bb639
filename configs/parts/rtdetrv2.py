"""RT-DETRv2 (Lv et al. 2024, https://arxiv.org/abs/2407.17140) on COCO 2017: what its sizes share."""

from vitkit.configs.parts.realtime import dfine_data
from vitkit.configs.parts.rtdetr import rtdetr


def rtdetrv2(depth, epochs, strong_until, size_repeats=3):
    """RT-DETRv2 on a ResNet-vd of 18, 34, 50 or 101 layers; its last arguments are those of `dfine_data`."""
    cfg = rtdetr(depth)
    cfg["data"] = dfine_data(strong_until, size_repeats=size_repeats)
    cfg["model"]["type"] = "RTDETRv2"
    cfg["model"]["head"].update(type="RTDETRv2Head", num_points=[4, 4, 4], offset_scale=0.5, sampling="bilinear")
    cfg["optimizer"]["no_weight_decay"] = ["norms"]
    cfg["schedule"]["warmup_steps"] = 2000
    cfg["train"].update(epochs=epochs, precision="auto")
    return cfg
