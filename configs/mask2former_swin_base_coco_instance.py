"""Mask2Former-Swin-B on COCO 2017 instance segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_base_coco_instance.py
           train.precision=bf16
Reference: 48.1 mask AP (original model zoo). 106.9 M parameters, 466 GMACs (paper); 46.7 mask AP from
           ImageNet-1k weights (model.backbone.pretrained=true). Here: not yet run.
Weights:   maskformer2_swin_base_IN21k_384_bs16_50ep/model_final_83d103.pkl
"""

from vitkit.configs.mask2former_r50_coco_instance import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    return with_swin(base(), "swin_base")
