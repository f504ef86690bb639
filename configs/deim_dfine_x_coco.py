"""DEIM-D-FINE-X on COCO 2017, 58 epochs (Huang et al. 2024, https://arxiv.org/abs/2412.04234).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/deim_dfine_x_coco.py
Reference: 56.5 box AP (original README). 62,621,558 parameters with 80 classes. Here: not yet run.
"""

from vitkit.configs.parts.dfine import deim


def config():
    return deim(
        "x", lr=5e-4, backbone_lr=5e-6, weight_decay=1.25e-4, epochs=58, mosaic_until=29, strong_until=50,
        size_repeats=3, restart_ema_decay=0.9998,
    )  # fmt: skip
