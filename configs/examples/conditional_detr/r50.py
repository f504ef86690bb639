"""Conditional DETR-R50 on COCO 2017 (Meng et al. 2021, https://arxiv.org/abs/2108.06152).

The head is in head.py, beside this file.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/examples/conditional_detr/r50.py
Reference: 40.9 box AP at 50 epochs, 44 M parameters (paper, table 1). Here: not yet run.
"""

from vitkit.configs.detr_r50 import config as detr_r50


def config():
    cfg = detr_r50()
    # A module rather than "head.py", so that configs in other folders can start from this one.
    cfg["imports"] = ["vitkit.configs.examples.conditional_detr.head"]
    cfg["model"].update(type="DeformableDETR", num_queries=300)  # one sigmoid per class
    cfg["model"]["head"]["type"] = "ConditionalDETRHead"
    cfg["criterion"] = dict(
        type="SetCriterion", class_loss="focal",
        weights=dict(labels=2.0, l1=5.0, giou=2.0),
        matcher=dict(type="HungarianMatcher", activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0),
    )  # fmt: skip
    cfg["schedule"]["drop_at_epochs"] = [40]
    cfg["train"]["epochs"] = 50
    return cfg
