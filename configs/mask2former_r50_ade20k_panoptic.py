"""Mask2Former-R50 on ADE20K panoptic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

AP and mIoU are of the same model. The data is prepared by Mask2Former's prepare_ade20k_pan_seg.py.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_r50_ade20k_panoptic.py train.precision=bf16
Reference: 39.7 PQ, 26.5 mask AP, 46.1 mIoU (original model zoo). 44.0 M parameters. Here: not yet run.
Weights:   maskformer2_R50_bs16_160k/model_final_5c90d4.pkl
"""

from vitkit.configs.mask2former_r50_ade20k_semantic import config as base
from vitkit.configs.parts.ade20k import PANOPTIC, ade20k_panoptic
from vitkit.configs.parts.panoptic import with_panoptic


def config():
    return with_panoptic(base(), ade20k_panoptic(images_per_gpu=2), PANOPTIC)
