"""Mask2Former-R50 on COCO 2017 panoptic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

AP and mIoU are of the same model; here AP is computed against the things of the panoptic maps, in the original against
the instances file, whose masks may overlap.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_r50_coco_panoptic.py train.precision=bf16
Reference: 51.9 PQ, 41.7 mask AP, 61.7 mIoU (original model zoo). 44.0 M parameters, 226 GMACs (paper).
           Here: not yet run.
Weights:   maskformer2_R50_bs16_50ep/model_final_94dc52.pkl
"""

from vitkit.configs.mask2former_r50_coco_instance import config as base
from vitkit.configs.parts.coco_panoptic import PANOPTIC, coco_panoptic
from vitkit.configs.parts.panoptic import with_panoptic


def config():
    return with_panoptic(base(), coco_panoptic(images_per_gpu=2), PANOPTIC)
