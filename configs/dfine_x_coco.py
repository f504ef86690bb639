"""D-FINE-X on COCO 2017, 80 epochs (Peng et al. 2024, https://arxiv.org/abs/2410.13842).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/dfine_x_coco.py
Reference: 55.8 box AP (original README). 62,621,558 parameters with 80 classes. Here: not yet run.
Weights:   dfine_x_coco.pth
"""

from vitkit.configs.parts.dfine import dfine


def config():
    return dfine(
        "x", lr=2.5e-4, backbone_lr=2.5e-6, weight_decay=1.25e-4, epochs=80, strong_until=72, size_repeats=3,
        restart_ema_decay=0.9998,
    )  # fmt: skip
