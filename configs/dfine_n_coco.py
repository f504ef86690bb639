"""D-FINE-N on COCO 2017, 160 epochs (Peng et al. 2024, https://arxiv.org/abs/2410.13842).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/dfine_n_coco.py
Reference: 42.8 box AP (original README). 3,782,691 parameters with 80 classes. Here: not yet run.
Weights:   dfine_n_coco.pth
"""

from vitkit.configs.parts.dfine import dfine


def config():
    return dfine("n", lr=8e-4, backbone_lr=4e-4, epochs=160, strong_until=148, batch_size=128)
