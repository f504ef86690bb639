"""RF-DETR-Seg-N on COCO 2017, 312x312 pixels (Robinson et al. 2025, https://arxiv.org/abs/2511.09554).

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rf_detr_seg_n_coco.py
Reference: 40.3 mask AP, 63.0 AP50 (original README). 33,577,091 parameters with 91 classes and 13 groups.
           Here: not yet run.
"""

from vitkit.configs.parts.rf_detr import rf_detr_seg


def config():
    return rf_detr_seg(resolution=312, num_decoder_layers=4, num_queries=100, num_windows=1)
