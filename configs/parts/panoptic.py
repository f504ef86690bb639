"""From one segmentation task to another: what a model predicts, learns from, and is scored by."""


def with_panoptic(cfg, data, classes):
    """A mask classification config for panoptic data, which is also scored by mask AP and mIoU; changed in place.

    `classes` are the model's: how many, and which have instances, of the published checkpoint; other data's size a run.
    """
    cfg["model"].update(tasks=["panoptic", "instance", "semantic"], **classes)
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


def with_instances(cfg, data, classes):
    """The same for instances, which are scored by mask AP."""
    cfg["model"].update(tasks=["instance"], **classes)
    cfg["data"] = data
    cfg["evaluator"] = dict(type="CocoEvaluator", iou_types=["segm"])
    cfg["train"]["best_metric"] = "segm/AP"
    return cfg
