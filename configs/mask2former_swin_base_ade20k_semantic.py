"""Mask2Former-Swin-B on ADE20K semantic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_base_ade20k_semantic.py
           train.precision=bf16
Reference: 53.9 mIoU, 55.1 mIoU with multi-scale and flip (original model zoo). 106.9 M parameters, 223
           GMACs (paper); 52.4 mIoU from ImageNet-1k weights (model.backbone.pretrained=true). Here: not yet
           run.
Weights:   maskformer2_swin_base_IN21k_384_bs16_160k_res640/model_final_7e47bf.pkl
"""

from vitkit.configs.mask2former_r50_ade20k_semantic import config as base
from vitkit.configs.parts.ade20k import ade20k_semantic
from vitkit.configs.parts.swin import with_swin


def config():
    cfg = with_swin(base(), "swin_base")
    cfg["data"] = ade20k_semantic(images_per_gpu=2, size=640)
    return cfg
