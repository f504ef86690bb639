"""RF-DETR-L on COCO 2017, 704x704 pixels (Robinson et al. 2025, https://arxiv.org/abs/2511.09554).

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rf_detr_l_coco.py
Reference: 56.5 box AP, 75.1 AP50 (original README). 33,932,834 parameters with 91 classes and 13 groups.
           Here: not yet run.
"""

from vitkit.configs.parts.rf_detr import rf_detr


def config():
    return rf_detr(resolution=704, num_decoder_layers=4)
