"""Two-stage Deformable DETR-R50 on COCO 2017 (Zhu et al. 2021, https://arxiv.org/abs/2010.04159).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/deformable_detr_r50_two_stage.py
Reference: 46.9 box AP at 50 epochs (original README). Here: not yet run.
"""

from vitkit.configs.deformable_detr_r50_refine import config as base


def config():
    cfg = base()
    cfg["model"]["head"]["two_stage"] = True
    cfg["optimizer"]["lr_multipliers"] = {"sampling_offsets": 0.1}  # no learned reference points
    return cfg
