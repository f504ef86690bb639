"""DETR-R50 with denoising (DN-DETR, Li et al. 2022, https://arxiv.org/abs/2203.01305) on COCO 2017, 50 epochs.

Five copies of up to 20 targets in addition to DETR's own queries. The paper's models use learned anchor boxes as
queries (DAB-DETR), unlike this one; the noise moves the corners of a box, rather than its center and size.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/dn_detr_r50.py
Reference: none published with these queries; 44.1 box AP at 50 epochs with the paper's. Here: not yet run.
"""

from vitkit.configs.detr_r50 import config as base


def config():
    cfg = base()
    cfg["model"]["training_queries"] = [
        dict(type="BoxDenoising", num_queries=100, contrastive=False, label_noise=0.4, box_noise=0.4),
    ]  # fmt: skip
    cfg["schedule"]["drop_at_epochs"] = [40]
    cfg["train"]["epochs"] = 50
    return cfg
