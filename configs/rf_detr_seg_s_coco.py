"""RF-DETR-Seg-S on COCO 2017, 384x384 pixels (Robinson et al. 2025, https://arxiv.org/abs/2511.09554).

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rf_detr_seg_s_coco.py
Reference: 43.1 mask AP, 66.2 AP50 (original README). 33,710,723 parameters with 91 classes and 13 groups.
           Here: not yet run.
"""

from vitkit.configs.parts.rf_detr import rf_detr_seg


def config():
    return rf_detr_seg(resolution=384, num_decoder_layers=4, num_queries=100)
