"""Mask2Former-R101 on COCO 2017 panoptic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_r101_coco_panoptic.py train.precision=bf16
Reference: 52.6 PQ, 42.6 mask AP, 62.4 mIoU (original model zoo). 62.9 M parameters, 293 GMACs (paper).
           Here: not yet run.
Weights:   maskformer2_R101_bs16_50ep/model_final_b807bd.pkl
"""

from vitkit.configs.mask2former_r50_coco_panoptic import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"]["depth"] = 101
    return cfg
