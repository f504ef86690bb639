"""DETR-R50 with masks on COCO 2017 panoptic segmentation (Carion et al. 2020, section 4.4,
https://arxiv.org/abs/2005.12872).

The second of two steps: a mask head on a frozen DETR that was trained on boxes of things and stuff, see
detr_r50_panoptic_boxes.py.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/detr_r50_panoptic.py --init
           runs/detr_r50_panoptic_boxes/best.pth
Reference: 38.8 box AP, 31.1 mask AP, 43.4 PQ (original README). 42.9 M parameters with 250 classes. Here: not yet
           run.
Weights:   detr-r50-panoptic-00ce5173.pth
"""

from vitkit.configs.detr_r50_panoptic_boxes import config as base
from vitkit.configs.parts.coco_panoptic import RAW_IDS


def config():
    cfg = base()
    cfg["model"].update(type="DETRSegmentation", freeze_detr=True, tasks=["panoptic", "instance"], **RAW_IDS)
    cfg["criterion"]["weights"].update(mask=1.0, dice=1.0)
    cfg["schedule"] = dict(type="MultiStepLR", drop_at_epochs=[15])
    cfg["evaluator"] = dict(
        type="CombinedEvaluator",
        evaluator=[dict(type="PanopticEvaluator"), dict(type="CocoEvaluator", iou_types=["bbox", "segm"])],
    )
    cfg["train"].update(epochs=25, best_metric="PQ")
    return cfg
