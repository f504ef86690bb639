"""D-FINE-M on COCO 2017, 132 epochs (Peng et al. 2024, https://arxiv.org/abs/2410.13842).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/dfine_m_coco.py
Reference: 52.3 box AP (original README). 19,590,062 parameters with 80 classes. Here: not yet run.
Weights:   dfine_m_coco.pth
"""

from vitkit.configs.parts.dfine import dfine


def config():
    return dfine("m", lr=2e-4, backbone_lr=2e-5, epochs=132, strong_until=120, size_repeats=6)
