"""Mask2Former-Swin-L on COCO 2017 instance segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_large_coco_instance.py
           train.precision=bf16
Reference: 50.1 mask AP (original model zoo). 215.5 M parameters, 868 GMACs (paper). Here: not yet run.
Weights:   maskformer2_swin_large_IN21k_384_bs16_100ep/model_final_e5f453.pkl
"""

from vitkit.configs.mask2former_r50_coco_instance import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    cfg = with_swin(base(), "swin_large")
    cfg["model"]["num_queries"] = 200
    # The original's 737,500 steps of 16 images are 100 passes; it drops after 655,556 and 710,184 of them.
    cfg["schedule"]["drop_at_epochs"] = [88.89, 96.30]
    cfg["train"]["epochs"] = 100
    return cfg
