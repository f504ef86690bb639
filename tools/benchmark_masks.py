"""MaskFormer and Mask2Former beside transformers'; random weights, images and masks."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitkit import build_model
from vitkit.configs import mask2former_r50_coco_instance, maskformer_r50_ade20k
from vitkit.registry import CRITERIA
from vitkit.tools.benchmark_models import CASES, Case, Contestant, import_transformers, make_call, unfreeze_residuals

TARGETS_PER_IMAGE = 8
"""About the mean of ADE20K and COCO."""
COCO_CLASSES, ADE20K_CLASSES = 80, 150
CLIP_GRAD_NORM = 0.01


class Batch(NamedTuple):
    """The same for all contestants."""

    images: Tensor
    """(B, 3, H, W) float."""
    labels: Tensor
    """(B, N) int64."""
    masks: Tensor
    """(B, N, H, W) bool."""


def cases(device: str, precision: str) -> list[Case]:
    """On a GPU also a training step at the size that Mask2Former is trained at on COCO."""
    large = [Case(1024, 1024, batch_size=2, training=True)] if device == "cuda" else []
    return [case._replace(device=device, precision=precision) for case in (*CASES, *large)]


def step(name: str, case: Case) -> Callable[[], object]:
    """What one call of the contestant runs, on its own model and the same data for all.

    A training step takes the same losses of all decoder layers at as many points, with frozen batch norms, and nothing
    else frozen.
    """
    torch.manual_seed(0)
    model, loss, predict = BUILDERS[name](case, random_batch(case))
    return make_call(case, model, loss, predict, clip_grad_norm=CLIP_GRAD_NORM)


def random_batch(case: Case) -> Batch:
    """Masks are rectangles with sides of a tenth to a half of the image's."""
    shape = (case.batch_size, TARGETS_PER_IMAGE)
    size = torch.rand(*shape, 2, 1) * 0.4 + 0.1
    start = torch.rand(*shape, 2, 1) * (1 - size)
    rows, columns = (
        (start[:, :, axis] <= places) & (places < start[:, :, axis] + size[:, :, axis])
        for axis, places in enumerate((torch.arange(length) / length) for length in (case.height, case.width))
    )
    return Batch(
        torch.randn(case.batch_size, 3, case.height, case.width).to(case.device),
        torch.randint(COCO_CLASSES, shape).to(case.device),
        (rows[..., :, None] & columns[..., None, :]).to(case.device),
    )


def vitkit_maskformer(case: Case, batch: Batch) -> Contestant:
    return vitkit_model(maskformer_r50_ade20k.config(), batch, num_classes=ADE20K_CLASSES)


def vitkit_mask2former(case: Case, batch: Batch) -> Contestant:
    return vitkit_model(mask2former_r50_coco_instance.config(), batch, num_classes=COCO_CLASSES)


def vitkit_model(config: dict[str, Any], batch: Batch, *, num_classes: int) -> Contestant:
    # transformers leaves the padding to a multiple of 32 to its image processor.
    model = build_model(config["model"] | dict(size_divisibility=1, num_classes=num_classes))
    criterion = CRITERIA.build(config["criterion"])
    targets = [dict(labels=labels, masks=masks) for labels, masks in zip(batch.labels, batch.masks)]

    def loss() -> Tensor:
        return sum(criterion(model(batch.images), targets).values())

    return model, loss, lambda: model(batch.images)


def transformers_maskformer(case: Case, batch: Batch) -> Contestant:
    transformers = import_transformers()
    # The original's dropout, which transformers leaves out of attention weights and feed-forward networks.
    decoder = transformers.models.maskformer.configuration_maskformer.MaskFormerDetrConfig(
        attention_dropout=0.1, activation_dropout=0.1, attn_implementation="sdpa"
    )
    config = transformers.MaskFormerConfig(
        backbone_config=resnet50(), decoder_config=decoder, num_labels=ADE20K_CLASSES, use_auxiliary_loss=case.training
    )
    model = transformers.MaskFormerForInstanceSegmentation(config)
    unfreeze_residuals(model.model.pixel_level_module.encoder)
    masks, labels = list(batch.masks.float()), list(batch.labels)

    def loss() -> Tensor:
        outputs = model.model(batch.images, output_hidden_states=True)
        # With its input, a decoder of six layers would have seven losses.
        outputs.transformer_decoder_hidden_states = outputs.transformer_decoder_hidden_states[1:]
        classes, predicted, auxiliary = model.get_logits(outputs)
        return model.get_loss(model.get_loss_dict(predicted, classes, masks, labels, auxiliary))

    return model, loss, lambda: model(batch.images)


def transformers_mask2former(case: Case, batch: Batch) -> Contestant:
    transformers = import_transformers()
    config = transformers.Mask2FormerConfig(backbone_config=resnet50(), num_labels=COCO_CLASSES)
    model = transformers.Mask2FormerForUniversalSegmentation(config)
    unfreeze_residuals(model.model.pixel_level_module.encoder)
    masks, labels = list(batch.masks.float()), list(batch.labels)

    def loss() -> Tensor:
        return model(batch.images, mask_labels=masks, class_labels=labels).loss

    return model, loss, lambda: model(batch.images)


def resnet50() -> Any:
    return import_transformers().TimmBackboneConfig(
        backbone="resnet50", out_indices=(1, 2, 3, 4), freeze_batch_norm_2d=True
    )


BUILDERS: Mapping[str, Callable[[Case, Batch], Contestant]] = {
    "transformers MaskFormer-R50 (SDPA)": transformers_maskformer,
    "vitkit MaskFormer-R50": vitkit_maskformer,
    "transformers Mask2Former-R50": transformers_mask2former,
    "vitkit Mask2Former-R50": vitkit_mask2former,
}
FAMILIES = {"maskformer": tuple(BUILDERS)[:2], "mask2former": tuple(BUILDERS)[2:]}
"""What is compared with each other, by part of the benchmark, the measure of the other first."""
