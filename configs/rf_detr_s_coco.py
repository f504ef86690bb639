"""RF-DETR-S on COCO 2017, 512x512 pixels (Robinson et al. 2025, https://arxiv.org/abs/2511.09554).

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rf_detr_s_coco.py
Reference: 53.0 box AP, 72.1 AP50 (original README). 32,110,786 parameters with 91 classes and 13 groups.
           Here: not yet run.
"""

from vitkit.configs.parts.rf_detr import rf_detr


def config():
    return rf_detr(resolution=512, num_decoder_layers=3)
