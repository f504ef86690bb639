"""Mask2Former-R50 with known queries (MP-Former, Zhang et al. 2023, https://arxiv.org/abs/2303.07336) on COCO 2017
instance segmentation.

In addition to the learned queries, there are as many noised copies of the targets' classes and masks as fit into 100.
They attend within the targets' masks in every layer, and have to predict the targets. Inference is the same as
Mask2Former's.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_r50_coco_instance_mp.py train.precision=bf16
Reference: 2.3 mask AP more than Mask2Former-R50 on Cityscapes (paper, abstract), to whose config the same keys can be
           given; Mask2Former-R50 has 43.7 mask AP on COCO. Here: not yet run.
"""

from vitkit.configs.mask2former_r50_coco_instance import config as base


def config():
    cfg = base()
    cfg["model"]["training_queries"] = [
        dict(type="MaskDenoising", num_queries=100, label_flips=0.2, mask_flips=0.2),
    ]  # fmt: skip
    return cfg
