"""Compare detectors with masks with the packages that publish them: D-FINE-S with D-FINE-seg's own (`dfine-seg`), and
ECSeg-S with LibreYOLO's (`libreyolo`); weights, images and targets are random.

An inference ends with the boxes of the best detections and their masks at the size of the image, in all of them by the
same number of detections; a training step has 100 objects in each image. Packages that cannot be imported are left out.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec

import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.configs import dfine_seg, ecseg
from vitkit.tools.benchmark.models import Case, Contestant, Family, RandomBatch, compare_family, vitkit_model
from vitkit.tools.benchmark.timing import Measurement, Options

SIDE, NUM_CLASSES, NUM_DETECTIONS = 640, 80, 100
CASES = (Case(SIDE, SIDE), Case(SIDE, SIDE, batch_size=2, training=True, targets_per_image=100))


def ours(config: Callable[[], dict], num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build vitkit's model with its loss, and its detections with masks."""
    built = vitkit_model(config, num_classes, batch, case, is_padded=False, num_detections=NUM_DETECTIONS)
    model, sizes = built.model, len(batch.images) * [(case.height, case.width)]
    return built._replace(predict=lambda: model.postprocess(model(batch.images), sizes))


def detections(outputs: Mapping[str, Tensor], size: tuple[int, int], threshold: float) -> tuple[Tensor, ...]:
    """Return the scores, boxes and masks of the best pairs of a query and a class of the first image, as the packages
    do for those above a score."""
    logits, masks = outputs["pred_logits"][0], outputs["pred_masks"][0]
    scores, best = logits.sigmoid().flatten().topk(NUM_DETECTIONS)
    query = best // logits.shape[1]
    resized = F.interpolate(masks[query][None], size=size, mode="bilinear", align_corners=False)[0] > threshold
    return scores, outputs["pred_boxes"][0, query], resized


def theirs(model: nn.Module, criterion: nn.Module, batch: RandomBatch, case: Case, threshold: float) -> Contestant:
    """Return a model with D-FINE's interface, whose masks are at a quarter of the image's size, and its loss."""
    names = ("labels", "boxes", "masks")
    targets = [dict(zip(names, values)) for values in zip(batch.labels, batch.boxes_cxcywh, batch.masks)]

    def loss() -> Tensor:
        return sum(criterion(model(batch.images, targets), targets).values())

    return Contestant(model, loss, lambda: detections(model(batch.images), (case.height, case.width), threshold))


def official_dfine_seg(num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build dfine-seg's D-FINE-S, whose masks are probabilities, with its loss."""
    from dfine_seg.model import dfine

    model = dfine.build_model("s", num_classes, True, "cpu", img_size=(case.height, case.width))
    criterion = dfine.build_loss("s", num_classes, 0.0, True)
    return theirs(model, criterion.to(batch.images.device), batch, case, 0.5)


def libreyolo_ecseg(num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build LibreYOLO's ECSeg-S with its loss, in inference in its deployed form."""
    from libreyolo.models.ec import nn as ec
    from libreyolo.models.ec.seg_loss import ECSegCriterion, ECSegHungarianMatcher

    model = ec.LibreECSegModel("s", nb_classes=num_classes, eval_spatial_size=(case.height, case.width))
    costs = dict(cost_class=2.0, cost_bbox=1.0, cost_giou=1.0, cost_mask_ce=5.0, cost_mask_dice=5.0)
    weights = dict(loss_mal=2.0, loss_bbox=1.0, loss_giou=1.0, loss_fgl=0.15, loss_ddf=1.5)
    criterion = ECSegCriterion(
        matcher=ECSegHungarianMatcher(costs),
        weight_dict=weights | dict(loss_mask_ce=5.0, loss_mask_dice=5.0),
        losses=["mal", "boxes", "local", "masks"],
        num_classes=num_classes,
        gamma=1.5,
    )
    return theirs(model if case.training else model.deploy(), criterion.to(batch.images.device), batch, case, 0.0)


def family(name: str, package: str, official: Callable[..., Contestant], config: Callable[[], dict]) -> Family:
    """Return a model's implementations: the package's if it can be imported, and vitkit's."""
    builders = {f"{package} {name}": official} if find_spec(package.replace("-", "_")) else {}
    return Family(
        builders | {f"vitkit {name}": partial(ours, config)}, num_classes=NUM_CLASSES, clip_grad_norm=0.1, cases=CASES
    )


FAMILIES = {
    "D-FINE-S with masks": ("dfine-seg", official_dfine_seg, partial(dfine_seg.config, "s")),
    "ECSeg-S": ("libreyolo", libreyolo_ecseg, partial(ecseg.config, "s")),
}


def measure(part: str, options: Options) -> list[Measurement]:
    """Measure all contestants of both families on each case; see `models`."""
    families = {name: family(name, *made) for name, made in FAMILIES.items()}
    return [
        row
        for name, of_family in families.items()
        for case in of_family.cases
        for row in compare_family(of_family, case, options, what=f"{name}, {case}")
    ]
