"""MaskFormer-Swin-B on COCO 2017 panoptic segmentation (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/maskformer_swin_base_coco_panoptic.py
Reference: 51.8 PQ (original model zoo). 101.8 M parameters, 411 GMACs (paper); 51.1 PQ from ImageNet-1k
           weights (model.backbone.pretrained=true). Here: not yet run.
Weights:   maskformer_panoptic_swin_base_IN21k_384_bs64_554k/model_final_4b7f49.pkl
"""

from vitkit.configs.maskformer_r50_coco_panoptic import config as base
from vitkit.configs.parts.swin import maskformer_with_swin


def config():
    cfg = maskformer_with_swin(base(), "swin_base")
    # The paper has no encoder in the pixel decoder if the backbone is a transformer.
    cfg["model"]["neck"] = dict(type="FPNPixelDecoder", out_channels=256)
    return cfg
