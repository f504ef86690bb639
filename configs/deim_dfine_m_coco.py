"""DEIM-D-FINE-M on COCO 2017, 102 epochs (Huang et al. 2024, https://arxiv.org/abs/2412.04234).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/deim_dfine_m_coco.py
Reference: 52.7 box AP (original README). 19,590,062 parameters with 80 classes. Here: not yet run.
"""

from vitkit.configs.parts.dfine import deim


def config():
    return deim("m", lr=4e-4, backbone_lr=4e-5, epochs=102, mosaic_until=49, strong_until=90, size_repeats=6)
