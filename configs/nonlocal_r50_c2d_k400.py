"""C2D ResNet-50 with five non-local blocks on Kinetics-400 (Wang et al. 2018, https://arxiv.org/abs/1711.07971).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/nonlocal_r50_c2d_k400.py
Reference: 73.9 top-1, 91.0 top-5 (original README), 400,000 steps; 10 clips x 3 crops of 256. Here: not yet run.
"""

from vitkit.configs.parts.kinetics import nonlocal_r50


def config():
    return nonlocal_r50("nonlocal_c2d_r50_5block")
