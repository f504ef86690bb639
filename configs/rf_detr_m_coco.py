"""RF-DETR-M on COCO 2017, 576x576 pixels (Robinson et al. 2025, https://arxiv.org/abs/2511.09554).

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rf_detr_m_coco.py
Reference: 54.7 box AP, 73.6 AP50 (original README). 33,687,074 parameters with 91 classes and 13 groups.
           Here: not yet run.
"""

from vitkit.configs.parts.rf_detr import rf_detr


def config():
    return rf_detr(resolution=576, num_decoder_layers=4)
