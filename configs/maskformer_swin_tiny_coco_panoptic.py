"""MaskFormer-Swin-T on COCO 2017 panoptic segmentation (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/maskformer_swin_tiny_coco_panoptic.py
Reference: 47.7 PQ (original model zoo). 41.8 M parameters, 179 GMACs (paper). Here: not yet run.
Weights:   maskformer_panoptic_swin_tiny_bs64_554k/model_final_539394.pkl
"""

from vitkit.configs.maskformer_r50_coco_panoptic import config as base
from vitkit.configs.parts.swin import maskformer_with_swin


def config():
    cfg = maskformer_with_swin(base(), "swin_tiny")
    # The paper has no encoder in the pixel decoder if the backbone is a transformer.
    cfg["model"]["neck"] = dict(type="FPNPixelDecoder", out_channels=256)
    return cfg
