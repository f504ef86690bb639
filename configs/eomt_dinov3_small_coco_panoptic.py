"""EoMT-S on DINOv3 (640x640), COCO 2017 panoptic segmentation (Kerssies et al. 2025, https://arxiv.org/abs/2503.19108).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/eomt_dinov3_small_coco_panoptic.py train.precision=fp16
Reference: its original publishes weights as differences from DINOv3's. Here: not yet run.
"""

from vitkit.configs.eomt_dinov3_large_coco_panoptic import config as base


def config():
    cfg = base()
    cfg["model"]["num_blocks"] = 3
    cfg["model"]["backbone"]["type"] = "vit_small_patch16_dinov3_qkvb"
    cfg["optimizer"]["full_rate_blocks"] = 3
    return cfg
