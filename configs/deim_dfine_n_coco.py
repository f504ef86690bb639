"""DEIM-D-FINE-N on COCO 2017, 160 epochs (Huang et al. 2024, https://arxiv.org/abs/2412.04234).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/deim_dfine_n_coco.py
Reference: 43.0 box AP (original README). 3,782,691 parameters with 80 classes. Here: not yet run.
"""

from vitkit.configs.parts.dfine import deim


def config():
    return deim(
        "n", lr=8e-4, backbone_lr=4e-4, epochs=160, mosaic_until=78, strong_until=148, batch_size=128,
        schedule=dict(type="ConstantLR", warmup_steps=2000),
    )  # fmt: skip
