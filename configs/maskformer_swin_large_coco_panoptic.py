"""MaskFormer-Swin-L on COCO 2017 panoptic segmentation (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/maskformer_swin_large_coco_panoptic.py
Reference: 52.7 PQ (original model zoo). 211.6 M parameters, 792 GMACs (paper). Here: not yet run.
Weights:   maskformer_panoptic_swin_large_IN21k_384_bs64_554k/model_final_7505c4.pkl
"""

from vitkit.configs.maskformer_r50_coco_panoptic import config as base
from vitkit.configs.parts.swin import maskformer_with_swin


def config():
    cfg = maskformer_with_swin(base(), "swin_large")
    # The paper has no encoder in the pixel decoder if the backbone is a transformer.
    cfg["model"]["neck"] = dict(type="FPNPixelDecoder", out_channels=256)
    cfg["data"]["train"]["transforms"]["max_size"] = 1000
    return cfg
