"""Mask2Former-R50 on Cityscapes panoptic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

AP and mIoU are of the same model; the published AP is computed by Cityscapes' own script, here it is COCO's.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_r50_cityscapes_panoptic.py
           train.precision=bf16
Reference: 62.1 PQ, 37.3 mask AP, 77.5 mIoU (original model zoo). 44.0 M parameters. Here: not yet run.
Weights:   maskformer2_R50_bs16_90k/model_final_4ab90c.pkl
"""

from vitkit.configs.mask2former_r50_cityscapes_semantic import config as base
from vitkit.configs.parts.cityscapes import PANOPTIC, cityscapes_panoptic
from vitkit.configs.parts.panoptic import with_panoptic


def config():
    return with_panoptic(base(), cityscapes_panoptic(images_per_gpu=2), PANOPTIC)
