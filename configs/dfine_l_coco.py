"""D-FINE-L on COCO 2017, 80 epochs (Peng et al. 2024, https://arxiv.org/abs/2410.13842).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/dfine_l_coco.py
Reference: 54.0 box AP (original README). 31,244,150 parameters with 80 classes. Here: not yet run.
Weights:   dfine_l_coco.pth
"""

from vitkit.configs.parts.dfine import dfine


def config():
    return dfine(
        "l", lr=2.5e-4, backbone_lr=1.25e-5, weight_decay=1.25e-4, epochs=80, strong_until=72, size_repeats=4,
    )  # fmt: skip
