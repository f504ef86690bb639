"""Detectors beside transformers' and, as a known quantity, torchvision's Faster R-CNN; random weights and images."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.models.detection import fasterrcnn_resnet50_fpn
from torchvision.ops import box_convert

from vitkit import build_model
from vitkit.configs import deformable_detr_r50, detr_r50
from vitkit.engine.optim import parameter_groups
from vitkit.errors import VitkitError
from vitkit.registry import CRITERIA
from vitkit.tools.benchmark_timing import Row, compare, peak_memory

NUM_CLASSES = 91
TARGETS_PER_IMAGE = 7
"""About COCO's mean."""


class Case(NamedTuple):
    """What is run."""

    height: int
    width: int
    batch_size: int = 1
    training: bool = False
    device: str = "cpu"
    precision: str = "fp32"

    def __str__(self) -> str:
        what = "training step" if self.training else "inference"
        return f"{what}, {self.height}x{self.width}, batch {self.batch_size}"


CASES = (
    Case(480, 640),
    Case(800, 1066),
    Case(480, 640, batch_size=2, training=True),
    Case(800, 1066, training=True),
)


def step(name: str, case: Case) -> Callable[[], object]:
    """What one call of the contestant runs, on its own model and the same data for all.

    All train the same layers (stem and first stage are frozen), and both forms of a model drop out in the same places
    and take the loss of all six decoder layers.
    """
    torch.manual_seed(0)
    images = torch.randn(case.batch_size, 3, case.height, case.width, device=case.device)
    boxes_cxcywh = torch.rand(case.batch_size, TARGETS_PER_IMAGE, 4, device=case.device) * 0.5 + 0.25
    labels = torch.randint(1, NUM_CLASSES, boxes_cxcywh.shape[:2], device=case.device)
    return make_call(case, *BUILDERS[name](case, images, boxes_cxcywh, labels), clip_grad_norm=0.1)


def make_call(
    case: Case,
    model: nn.Module,
    loss: Callable[[], Tensor],
    predict: Callable[[], object],
    *,
    clip_grad_norm: float,
) -> Callable[[], object]:
    """Inference or a training step with what a builder gives."""
    model.to(case.device).train(case.training)
    autocast = torch.autocast(torch.device(case.device).type, torch.bfloat16, enabled=case.precision == "bf16")

    def infer() -> None:
        with torch.inference_mode(), autocast:
            predict()

    if not case.training:
        return infer
    groups = parameter_groups(model, lr=1e-4, backbone_lr=1e-5, weight_decay=1e-4)
    optimizer = torch.optim.AdamW(groups)

    def train() -> None:
        with autocast:
            total = loss()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return train


def measure(
    contestants: Sequence[str],
    cases: Sequence[Case] = CASES,
    *,
    build: Callable[[str, Case], Callable[[], object]] = step,
    repeats: int = 7,
    memory: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Times all contestants in turn, in this process; peak memory in a new process each.

    A training step is forward, loss, backward, clipping and AdamW.

    Args:
        contestants: one of FAMILIES' values.
        build: gives a contestant's call.
    """
    rows = []
    for case in cases:
        calls = {name: build(name, case) for name in contestants}
        timed = compare(str(case), calls, repeats=repeats, device=case.device, clock=clock)
        del calls  # their models
        peaks = [peak_memory(build, row.name, case, device=case.device) if memory else None for row in timed]
        rows += [row._replace(peak_mib=peak, peak_ratio=peak and peak / peaks[0]) for row, peak in zip(timed, peaks)]
    return rows


Contestant = tuple[nn.Module, Callable[[], Tensor], Callable[[], object]]
"""A model, what gives its loss, and what gives its predictions."""


def vitkit_detr(case: Case, images: Tensor, boxes_cxcywh: Tensor, labels: Tensor) -> Contestant:
    return vitkit_model(detr_r50.config(), images, boxes_cxcywh, labels)


def vitkit_deformable_detr(case: Case, images: Tensor, boxes_cxcywh: Tensor, labels: Tensor) -> Contestant:
    return vitkit_model(deformable_detr_r50.config(), images, boxes_cxcywh, labels)


def vitkit_model(config: dict[str, Any], images: Tensor, boxes_cxcywh: Tensor, labels: Tensor) -> Contestant:
    model = build_model(config["model"])
    criterion = CRITERIA.build(config["criterion"])
    padding_mask = torch.zeros_like(images[:, 0], dtype=torch.bool)
    targets = [dict(labels=l, boxes_cxcywh=b) for l, b in zip(labels, boxes_cxcywh)]

    def loss() -> Tensor:
        return sum(criterion(model(images, padding_mask), targets).values())

    return model, loss, lambda: model(images, padding_mask)


def transformers_detr(case: Case, images: Tensor, boxes_cxcywh: Tensor, labels: Tensor) -> Contestant:
    transformers = import_transformers()
    # The original's dropout, which transformers leaves out of attention weights and feed-forward networks, and its
    # auxiliary losses.
    config = transformers.DetrConfig(
        num_labels=NUM_CLASSES,
        attention_dropout=0.1,
        activation_dropout=0.1,
        auxiliary_loss=True,
        attn_implementation="sdpa",
    )
    return transformers_model(transformers.DetrForObjectDetection(config), images, boxes_cxcywh, labels)


def transformers_deformable_detr(case: Case, images: Tensor, boxes_cxcywh: Tensor, labels: Tensor) -> Contestant:
    transformers = import_transformers()
    config = transformers.DeformableDetrConfig(
        num_labels=NUM_CLASSES,
        attention_dropout=0.1,
        activation_dropout=0.1,
        auxiliary_loss=True,
        class_cost=2,
        attn_implementation="sdpa",
    )
    return transformers_model(transformers.DeformableDetrForObjectDetection(config), images, boxes_cxcywh, labels)


def import_transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise VitkitError(
            f"the comparison with transformers needs the package ({error}): pip install -e '.[benchmark]'"
        ) from None
    return transformers


def transformers_model(model: nn.Module, images: Tensor, boxes_cxcywh: Tensor, labels: Tensor) -> Contestant:
    backbone = model.model.backbone.model
    freeze(backbone.conv1, backbone.layer1)
    unfreeze_residuals(backbone)
    pixel_mask = torch.ones_like(images[:, 0], dtype=torch.int64)
    targets = [dict(class_labels=l, boxes=b) for l, b in zip(labels, boxes_cxcywh)]

    def loss() -> Tensor:
        return model(images, pixel_mask, labels=targets).loss

    return model, loss, lambda: model(images, pixel_mask)


def faster_rcnn(case: Case, images: Tensor, boxes_cxcywh: Tensor, labels: Tensor) -> Contestant:
    model = fasterrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=NUM_CLASSES,
        min_size=min(case.height, case.width),
        max_size=max(case.height, case.width),
    )
    freeze(model.backbone.body.conv1, model.backbone.body.bn1, model.backbone.body.layer1)
    size = torch.tensor([case.width, case.height] * 2, device=boxes_cxcywh.device)
    boxes_xyxy = box_convert(boxes_cxcywh, "cxcywh", "xyxy") * size
    targets = [dict(labels=l, boxes=b) for l, b in zip(labels, boxes_xyxy)]

    def loss() -> Tensor:
        return sum(model(list(images), targets).values())

    return model, loss, lambda: model(list(images))


def unfreeze_residuals(backbone: nn.Module) -> None:
    """timm sets each block's last scale to zero, so that its gradients would be, too."""
    for module in backbone.modules():
        if "BatchNorm" in type(module).__name__:
            nn.init.ones_(module.weight)


def freeze(*modules: nn.Module) -> None:
    for module in modules:
        module.requires_grad_(False)


BUILDERS: Mapping[str, Callable[..., Any]] = {
    "transformers DETR-R50 (SDPA)": transformers_detr,
    "vitkit DETR-R50": vitkit_detr,
    "torchvision Faster R-CNN R50-FPN": faster_rcnn,
    "transformers Deformable DETR-R50": transformers_deformable_detr,
    "vitkit Deformable DETR-R50": vitkit_deformable_detr,
}
FAMILIES = (tuple(BUILDERS)[:3], tuple(BUILDERS)[3:])
"""What is compared with each other, the measure of the others first."""
