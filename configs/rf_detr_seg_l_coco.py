"""RF-DETR-Seg-L on COCO 2017, 504x504 pixels (Robinson et al. 2025, https://arxiv.org/abs/2511.09554).

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rf_detr_seg_l_coco.py
Reference: 47.1 mask AP, 70.5 AP50 (original README). 35,873,587 parameters with 91 classes and 13 groups.
           Here: not yet run.
"""

from vitkit.configs.parts.rf_detr import rf_detr_seg


def config():
    return rf_detr_seg(resolution=504, num_decoder_layers=5, num_queries=200)
