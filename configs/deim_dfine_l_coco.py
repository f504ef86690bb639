"""DEIM-D-FINE-L on COCO 2017, 58 epochs (Huang et al. 2024, https://arxiv.org/abs/2412.04234).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/deim_dfine_l_coco.py
Reference: 54.7 box AP (original README). 31,244,150 parameters with 80 classes. Here: not yet run.
"""

from vitkit.configs.parts.dfine import deim


def config():
    return deim(
        "l", lr=5e-4, backbone_lr=2.5e-5, weight_decay=1.25e-4, epochs=58, mosaic_until=29, strong_until=50,
        size_repeats=4,
    )  # fmt: skip
