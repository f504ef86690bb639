"""RF-DETR-Seg-M on COCO 2017, 432x432 pixels (Robinson et al. 2025, https://arxiv.org/abs/2511.09554).

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rf_detr_seg_m_coco.py
Reference: 45.3 mask AP, 68.4 AP50 (original README). 35,693,875 parameters with 91 classes and 13 groups.
           Here: not yet run.
"""

from vitkit.configs.parts.rf_detr import rf_detr_seg


def config():
    return rf_detr_seg(resolution=432, num_decoder_layers=5, num_queries=200)
