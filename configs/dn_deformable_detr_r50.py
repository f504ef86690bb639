"""Deformable DETR-R50 with denoising (DN-DETR, Li et al. 2022, https://arxiv.org/abs/2203.01305) on COCO 2017, 50
epochs.

Queries are learned anchor boxes (DAB-DETR, https://arxiv.org/abs/2201.12329), which each layer refines, in addition to
five copies of up to 20 targets. The noise moves the corners of a box, rather than its center and size as in the paper.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/dn_deformable_detr_r50.py
Reference: 48.6 box AP at 50 epochs (paper, with its noise). Here: not yet run.
"""

from vitkit.configs.deformable_detr_r50_refine import config as base


def config():
    cfg = base()
    head = cfg["model"]["head"] | dict(type="DABDeformableDETRHead")
    del head["refine_boxes"]  # always
    cfg["model"]["head"] = head
    cfg["model"]["training_queries"] = [
        dict(type="BoxDenoising", num_queries=100, contrastive=False, label_noise=0.4, box_noise=0.4),
    ]  # fmt: skip
    cfg["optimizer"]["lr_multipliers"] = {"sampling_offsets": 0.1}  # no learned reference points
    return cfg
