"""D-FINE-S on COCO 2017, 132 epochs (Peng et al. 2024, https://arxiv.org/abs/2410.13842).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/dfine_s_coco.py
Reference: 48.5 box AP (original README). 10,321,875 parameters with 80 classes. Here: not yet run.
Weights:   dfine_s_coco.pth
"""

from vitkit.configs.parts.dfine import dfine


def config():
    return dfine("s", lr=2e-4, backbone_lr=1e-4, epochs=132, strong_until=120, size_repeats=20)
