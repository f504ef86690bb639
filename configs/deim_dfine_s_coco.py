"""DEIM-D-FINE-S on COCO 2017, 132 epochs (Huang et al. 2024, https://arxiv.org/abs/2412.04234).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/deim_dfine_s_coco.py
Reference: 49.0 box AP (original README). 10,321,875 parameters with 80 classes. Here: not yet run.
"""

from vitkit.configs.parts.dfine import deim


def config():
    return deim("s", lr=4e-4, backbone_lr=2e-4, epochs=132, mosaic_until=64, strong_until=120, size_repeats=20)
