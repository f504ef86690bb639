"""Mask2Former-R50 on Cityscapes instance segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

The published AP is computed by Cityscapes' own script, here it is COCO's.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_r50_cityscapes_instance.py
           train.precision=bf16
Reference: 37.4 mask AP (original model zoo). 44.0 M parameters. Here: not yet run.
Weights:   maskformer2_R50_bs16_90k/model_final_01a8ed.pkl
"""

from vitkit.configs.mask2former_r50_cityscapes_semantic import config as base
from vitkit.configs.parts.cityscapes import INSTANCE, cityscapes_instance
from vitkit.configs.parts.panoptic import with_instances


def config():
    return with_instances(base(), cityscapes_instance(images_per_gpu=2), INSTANCE)
