"""From one segmentation task to another: what a model predicts, learns from, and is scored by."""


def with_panoptic(cfg, data):
    """A mask classification config for panoptic data, which is also scored by mask AP and mIoU; changed in place."""
    cfg["model"]["tasks"] = ["panoptic", "instance", "semantic"]
    cfg["data"] = data
    cfg["evaluator"] = dict(
        type="CombinedEvaluator",
        evaluator=[
            dict(type="PanopticEvaluator"),
            dict(type="CocoEvaluator", iou_types=["segm"]),
            dict(type="SemanticEvaluator", boundary=False),
        ],
    )
    cfg["train"]["best_metric"] = "PQ"
    return cfg


def with_instances(cfg, data):
    """The same for instances, which are scored by mask AP."""
    cfg["model"]["tasks"] = ["instance"]
    cfg["data"] = data
    cfg["evaluator"] = dict(type="CocoEvaluator", iou_types=["segm"])
    cfg["train"]["best_metric"] = "segm/AP"
    return cfg
