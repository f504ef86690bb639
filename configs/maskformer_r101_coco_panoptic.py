"""MaskFormer-R101 on COCO 2017 panoptic segmentation (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/maskformer_r101_coco_panoptic.py
Reference: 47.6 PQ (original model zoo). 64.0 M parameters, 248 GMACs (paper). Here: not yet run.
Weights:   maskformer_panoptic_R101_bs64_554k/model_final_57b049.pkl
"""

from vitkit.configs.maskformer_r50_coco_panoptic import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"]["depth"] = 101
    return cfg
