"""EoMT-S (DINOv2, 512x512) on ADE20K semantic segmentation (Kerssies et al. 2025, https://arxiv.org/abs/2503.19108).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/eomt_small_ade20k_semantic.py train.precision=fp16
Reference: none published for this size. Here: not yet run.
"""

from vitkit.configs.eomt_base_ade20k_semantic import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"]["type"] = "vit_small_patch14_reg4_dinov2"
    return cfg
