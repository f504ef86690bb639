"""Mask2Former-R50 on Cityscapes semantic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

The original synchronizes the backbone's batch norms over the GPUs; here each has its own statistics.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_r50_cityscapes_semantic.py
           train.precision=bf16
Reference: 79.4 mIoU, 82.2 mIoU with multi-scale and flip (original model zoo). 44.0 M parameters. Here: not yet run.
Weights:   maskformer2_R50_bs16_90k/model_final_cc1b1f.pkl
"""

from vitkit.configs.mask2former_r50_ade20k_semantic import config as base
from vitkit.configs.parts.cityscapes import SEMANTIC, cityscapes_semantic


def config():
    cfg = base()
    cfg["model"].update(SEMANTIC)
    cfg["model"]["backbone"]["norm"] = "bn"
    cfg["data"] = cityscapes_semantic(images_per_gpu=2)
    # The original's 90,000 steps of 16 images are 484 passes over the 2,975 images.
    cfg["train"].update(epochs=484, eval_every=27)
    return cfg
