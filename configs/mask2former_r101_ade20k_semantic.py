"""Mask2Former-R101 on ADE20K semantic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

The original's backbone has batch norms, synchronized over the GPUs; here each GPU has its own statistics.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_r101_ade20k_semantic.py train.precision=bf16
Reference: 47.8 mIoU, 50.1 mIoU with multi-scale and flip (original model zoo). 63.0 M parameters, 90 GMACs
           (paper). Here: not yet run.
Weights:   maskformer2_R101_bs16_90k/model_final_0d68be.pkl
"""

from vitkit.configs.mask2former_r50_ade20k_semantic import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"].update(depth=101, norm="bn")
    return cfg
