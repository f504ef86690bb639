"""EoMT-B (DINOv2, 640x640) on COCO 2017 panoptic segmentation (Kerssies et al. 2025, https://arxiv.org/abs/2503.19108).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/eomt_base_coco_panoptic.py train.precision=fp16
Reference: 50.6 PQ after 12 epochs, 51.6 after 24 (train.epochs=24; original model zoo). Here: not yet run.
Weights:   coco_panoptic_eomt_base_640_2x/resolve/main/pytorch_model.bin (24 epochs)
"""

from vitkit.configs.eomt_large_coco_panoptic import config as base


def config():
    cfg = base()
    cfg["model"]["num_blocks"] = 3
    cfg["model"]["backbone"]["type"] = "vit_base_patch14_reg4_dinov2"
    return cfg
