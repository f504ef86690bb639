"""RF-DETR-N on COCO 2017, 384x384 pixels (Robinson et al. 2025, https://arxiv.org/abs/2511.09554).

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rf_detr_n_coco.py
Reference: 48.4 box AP, 67.6 AP50 (original README). 30,466,914 parameters with 91 classes and 13 groups.
           Here: not yet run.
"""

from vitkit.configs.parts.rf_detr import rf_detr


def config():
    return rf_detr(resolution=384, num_decoder_layers=2)
