"""Converts a config from one segmentation task to another: model, data and evaluator."""


def with_panoptic(cfg, data, classes):
    """Set a mask classification config to panoptic data, also evaluated by mask AP and mIoU; changes it in place.

    `classes` are the model's arguments for the published checkpoint: number of classes, and which have instances; a run
    on other data sets them from its dataset.
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
    """Set a config to instance segmentation, evaluated by mask AP, in the same way."""
    cfg["model"].update(tasks=["instance"], **classes)
    cfg["data"] = data
    cfg["evaluator"] = dict(type="CocoEvaluator", iou_types=["segm"])
    cfg["train"]["best_metric"] = "segm/AP"
    return cfg
