"""Compare models with others of the same architecture: transformers', timm's and, as a reference, torchvision's Faster
R-CNN; weights, images and targets are random."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection import fasterrcnn_resnet50_fpn
from torchvision.ops import box_convert

from vitkit import build_model
from vitkit.configs import deformable_detr, detr_r50, dino, eomt, mask2former, maskformer
from vitkit.configs.pretrain import mae
from vitkit.engine.optimizers import parameter_groups
from vitkit.errors import VitkitError
from vitkit.ops.packed_masks import PackedMasks
from vitkit.protocols.model import Model
from vitkit.registry import BACKBONES, CRITERIA
from vitkit.structures import UncompiledTargets
from vitkit.tools.benchmark.timing import Call, Measurement, Options, compare


class Case(NamedTuple):
    """The image size, the batch size, whether a training step or inference is run, and the number of targets."""

    height: int
    width: int
    batch_size: int = 1
    training: bool = False
    targets_per_image: int = 7
    """About COCO's mean."""

    def __str__(self) -> str:
        task = "training step" if self.training else "inference"
        return f"{task}, {self.height}x{self.width}, batch {self.batch_size}"


class RandomBatch(NamedTuple):
    """The data of all contestants: B images with N targets each."""

    images: Tensor
    """(B, 3, H, W) float."""
    labels: Tensor
    """(B, N) int64, counted from 1."""
    boxes_cxcywh: Tensor
    """(B, N, 4) float in 0..1."""
    masks: Tensor
    """(B, N, H, W) bool: the filled boxes."""


class Contestant(NamedTuple):
    """A model, and the functions that are timed."""

    model: nn.Module
    loss: Callable[[], Tensor]
    predict: Call


class Family(NamedTuple):
    """Models that are compared with each other."""

    builders: Mapping[str, Callable[[int, RandomBatch, Case], Contestant]]
    """Name of the row -> a function that builds the contestant from the number of classes, the data and the case; the
    reference comes first."""
    num_classes: int
    clip_grad_norm: float | None = None
    """The norm to which gradients are clipped: a training step is forward, loss, backward, clipping and AdamW. None: it
    ends with backward."""
    cases: Sequence[Case] = (
        Case(480, 640),
        Case(800, 1066),
        Case(480, 640, batch_size=2, training=True),
        Case(800, 1066, training=True),
    )
    gpu_cases: Sequence[Case] = ()


def measure(part: str, options: Options) -> list[Measurement]:
    """Measure all contestants of a family, or of every backbone's family, on each case."""
    rows = []
    for name, family in BACKBONE_FAMILIES.items() if part == "backbones" else [("", FAMILIES[part])]:
        for case in (*family.cases, *(family.gpu_cases if options.device == "cuda" else ())):
            rows += compare_family(family, case, options, what=f"{name}, {case}" if name else str(case))
    return rows


def compare_family(family: Family, case: Case, options: Options, *, what: str) -> list[Measurement]:
    """Measure all contestants of a family on a case."""
    if options.compiled:
        if not case.training:
            return []
        what += ", compiled"
    return compare(what, {name: partial(step, family, name, case, options) for name in family.builders}, options)


def step(family: Family, name: str, case: Case, options: Options) -> Call:
    """Return a call of a contestant, inference or a training step, on the same data for all.

    All implementations train the same layers, have dropout at the same points and the losses of all decoder layers.
    """
    torch.manual_seed(0)
    batch = random_batch(case, family.num_classes, options.device)
    contestant = family.builders[name](family.num_classes, batch, case)
    model = contestant.model.to(options.device).train(case.training)

    def infer() -> None:
        with torch.inference_mode(), options.autocast():
            contestant.predict()

    if not case.training:
        if isinstance(model, Model):
            model.fuse()
        return infer
    if options.compiled:
        model.compile()
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-4, backbone_lr=1e-5, weight_decay=1e-4))

    def train() -> None:
        with options.autocast():
            loss = contestant.loss()
        loss.backward()
        if family.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), family.clip_grad_norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return train


def random_batch(case: Case, num_classes: int, device: str = "cpu") -> RandomBatch:
    """Return random images with targets whose sides are a tenth to a half of the image's."""
    shape = (case.batch_size, case.targets_per_image)
    sizes = torch.rand(*shape, 2) * 0.4 + 0.1
    corners = torch.rand(*shape, 2) * (1 - sizes)
    columns, rows = (
        (corners[..., axis, None] <= pixels) & (pixels < (corners + sizes)[..., axis, None])
        for axis, pixels in enumerate((torch.arange(length) / length) for length in (case.width, case.height))
    )
    batch = RandomBatch(
        images=torch.randn(case.batch_size, 3, case.height, case.width),
        labels=torch.randint(1, num_classes, shape),
        boxes_cxcywh=torch.cat([corners + sizes / 2, sizes], dim=-1),
        masks=rows[..., :, None] & columns[..., None, :],
    )
    return RandomBatch(*(tensor.to(device) for tensor in batch))


def targets_of(batch: RandomBatch, *, masks: bool = True) -> list[dict[str, Tensor]]:
    """Return a batch's targets in the form in which datasets give them."""
    targets = [dict(labels=labels, boxes_cxcywh=boxes) for labels, boxes in zip(batch.labels, batch.boxes_cxcywh)]
    for target, dense in zip(targets, batch.masks if masks else ()):
        target["masks"] = PackedMasks.pack(dense.cpu().numpy(), dense.shape[1:]).to(dense.device)
    return targets


def vitkit_model(
    make_config: Callable[[], dict],
    num_classes: int,
    batch: RandomBatch,
    case: Case,
    *,
    is_padded: bool,
    **settings: Any,
) -> Contestant:
    """Build the model of one of vitkit's configs, with its loss on the batch.

    Args:
        make_config: a config file's function.
        is_padded: whether the model gets a padding mask, as transformers' detectors do but not its mask models.
        settings: further arguments of the model.
    """
    config = make_config()
    model = build_model(config["model"] | dict(num_classes=num_classes) | settings)
    criterion = CRITERIA.build(config["criterion"])
    padding_mask = torch.zeros_like(batch.images[:, 0], dtype=torch.bool) if is_padded else None
    targets = targets_of(batch)
    known = {"targets": UncompiledTargets(targets)} if model.uses_targets else {}

    def loss() -> Tensor:
        return sum(criterion(model(batch.images, padding_mask, **known), targets).values())

    return Contestant(model, loss, lambda: model(batch.images, padding_mask))


def dino_with_300_queries() -> dict:
    """Return the config of DINO with as many queries as Deformable DETR."""
    config = dino.config()
    config["model"]["num_queries"] = 300
    return config


def import_transformers() -> ModuleType:
    """Import transformers; raise a VitkitError with the remedy if it is missing."""
    try:
        import transformers
    except ImportError as error:
        raise VitkitError(
            f"the comparison with transformers needs the package ({error}): pip install -e '.[benchmark]'"
        ) from None
    return transformers


DROPOUT = dict(attention_dropout=0.1, activation_dropout=0.1)
"""Dropout as in the original models; transformers' defaults have none in attention weights and feed-forward networks.
"""


def transformers_detector(name: str, num_classes: int, batch: RandomBatch, case: Case, **options: Any) -> Contestant:
    """Build transformers' DETR or Deformable DETR with its loss on the batch; the first stages are frozen as in vitkit.

    Args:
        name: the beginning of its class names, before "Config" and "ForObjectDetection".
    """
    transformers = import_transformers()
    config = getattr(transformers, f"{name}Config")(
        num_labels=num_classes, auxiliary_loss=True, attn_implementation="sdpa", **DROPOUT, **options
    )
    model = getattr(transformers, f"{name}ForObjectDetection")(config)
    backbone = model.model.backbone.model
    freeze(backbone.conv1, backbone.layer1)
    unfreeze_residuals(backbone)
    pixel_mask = torch.ones_like(batch.images[:, 0], dtype=torch.int64)
    targets = [dict(class_labels=labels, boxes=boxes) for labels, boxes in zip(batch.labels, batch.boxes_cxcywh)]

    def loss() -> Tensor:
        return model(batch.images, pixel_mask, labels=targets).loss

    return Contestant(model, loss, lambda: model(batch.images, pixel_mask))


def faster_rcnn(num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build torchvision's Faster R-CNN with its loss on the batch."""
    model = fasterrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=num_classes,
        min_size=min(case.height, case.width),
        max_size=max(case.height, case.width),
    )
    freeze(model.backbone.body.conv1, model.backbone.body.bn1, model.backbone.body.layer1)
    size = torch.tensor([case.width, case.height] * 2, device=batch.images.device)
    boxes_xyxy = box_convert(batch.boxes_cxcywh, "cxcywh", "xyxy") * size
    targets = [dict(labels=labels, boxes=boxes) for labels, boxes in zip(batch.labels, boxes_xyxy)]

    def loss() -> Tensor:
        return sum(model(list(batch.images), targets).values())

    return Contestant(model, loss, lambda: model(list(batch.images)))


def transformers_maskformer(num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build transformers' MaskFormer with its loss on the batch."""
    transformers = import_transformers()
    decoder = transformers.models.maskformer.configuration_maskformer.MaskFormerDetrConfig(
        attn_implementation="sdpa", **DROPOUT
    )
    config = transformers.MaskFormerConfig(
        backbone_config=resnet50(), decoder_config=decoder, num_labels=num_classes, use_auxiliary_loss=case.training
    )
    model = transformers.MaskFormerForInstanceSegmentation(config)
    unfreeze_residuals(model.model.pixel_level_module.encoder)
    masks, labels = list(batch.masks.float()), list(batch.labels)

    def loss() -> Tensor:
        outputs = model.model(batch.images, output_hidden_states=True)
        # The first hidden state is the decoder's input, which would add a seventh loss to those of its six layers.
        outputs.transformer_decoder_hidden_states = outputs.transformer_decoder_hidden_states[1:]
        classes, predicted, auxiliary = model.get_logits(outputs)
        return model.get_loss(model.get_loss_dict(predicted, classes, masks, labels, auxiliary))

    return Contestant(model, loss, lambda: model(batch.images))


def transformers_mask2former(num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build transformers' Mask2Former with its loss on the batch."""
    transformers = import_transformers()
    config = transformers.Mask2FormerConfig(backbone_config=resnet50(), num_labels=num_classes)
    model = transformers.Mask2FormerForUniversalSegmentation(config)
    unfreeze_residuals(model.model.pixel_level_module.encoder)
    masks, labels = list(batch.masks.float()), list(batch.labels)

    def loss() -> Tensor:
        return model(batch.images, mask_labels=masks, class_labels=labels).loss

    return Contestant(model, loss, lambda: model(batch.images))


def transformers_eomt(num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build transformers' EoMT-S with its loss on the batch, without masked attention, as after training."""
    transformers = import_transformers()
    config = transformers.EomtConfig(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=case.height, patch_size=16,
        num_blocks=3, num_queries=200, num_register_tokens=4, num_labels=num_classes, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.EomtForUniversalSegmentation(config)
    model.attn_mask_probs.zero_()
    masks, labels = list(batch.masks.float()), list(batch.labels)

    def loss() -> Tensor:
        return model(batch.images, mask_labels=masks, class_labels=labels).loss

    return Contestant(model, loss, lambda: model(batch.images))


def vitkit_eomt(num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build vitkit's EoMT-S likewise."""
    config = eomt.config("small")
    config["model"]["backbone"]["image_size"] = case.height
    contestant = vitkit_model(lambda: config, num_classes, batch, case, is_padded=True)
    contestant.model.set_mask_probabilities([0.0] * config["model"]["num_blocks"])
    return contestant


def transformers_mae(num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build transformers' MAE of a ViT-B with the loss that its published weights were trained with."""
    transformers = import_transformers()
    config = transformers.ViTMAEConfig(
        image_size=case.height, norm_pix_loss=True, layer_norm_eps=1e-6, attn_implementation="sdpa"
    )
    model = transformers.ViTMAEForPreTraining(config)
    return Contestant(model, lambda: model(batch.images).loss, lambda: model(batch.images))


def vitkit_mae(num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build vitkit's MAE likewise."""
    config = mae.config(image_size=case.height)
    model, criterion = build_model(config["model"]), CRITERIA.build(config["criterion"])
    targets: list[dict] = [{}] * len(batch.images)
    return Contestant(
        model, lambda: criterion(model(batch.images), targets)["reconstruction"], lambda: model(batch.images)
    )


def resnet50() -> Any:
    """Return transformers' config of timm's ResNet-50 with frozen batch norms."""
    return import_transformers().TimmBackboneConfig(
        backbone="resnet50", out_indices=(1, 2, 3, 4), freeze_batch_norm_2d=True
    )


def unfreeze_residuals(backbone: nn.Module) -> None:
    """Set the scales of batch norms to one: timm sets those at the end of blocks to zero, which zeroes gradients."""
    for module in backbone.modules():
        if "BatchNorm" in type(module).__name__:
            nn.init.ones_(module.weight)


def freeze(*modules: nn.Module) -> None:
    """Turn off the gradients of these modules' parameters."""
    for module in modules:
        module.requires_grad_(False)


def vitkit_backbone(name: str, num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build vitkit's classifier, without drop path, as its random numbers would differ from timm's."""
    return classifier(BACKBONES.build(name, num_classes=num_classes, drop_path=0.0), batch)


def timm_backbone(name: str, num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build timm's classifier for images of the case's size."""
    size: Any = (case.height, case.width)
    if "mvit" in name:
        size = max(size)  # only the square that its position tables are made for; the model takes any image
    resized = {} if case.height == case.width else dict(img_size=size)
    return classifier(timm.create_model(name, num_classes=num_classes, drop_path_rate=0.0, **resized), batch)


def classifier(model: nn.Module, batch: RandomBatch) -> Contestant:
    """Return a classifier with its cross entropy on the batch."""
    labels = batch.labels[:, 0]
    return Contestant(model, lambda: F.cross_entropy(model(batch.images), labels), lambda: model(batch.images))


def backbone_family(name: str, timm_name: str, side: int = 224) -> Family:
    """Return a backbone's two implementations, with cases of the size that it was made for and of larger images."""
    sizes = ((side, side, 4), (480, 640, 1))
    return Family(
        {"timm": partial(timm_backbone, timm_name), "vitkit": partial(vitkit_backbone, name)},
        num_classes=1000,
        cases=[Case(*size, training) for training in (False, True) for size in sizes],
    )


# transformers leaves the padding to a multiple of 32 to its image processor.
UNPADDED = dict(is_padded=False, size_divisibility=1)
DETECTION = dict(num_classes=91, clip_grad_norm=0.1)
# 1024x1024 is the size at which Mask2Former is trained on COCO.
MASKS = dict(clip_grad_norm=0.01, gpu_cases=[Case(1024, 1024, batch_size=2, training=True)])
FAMILIES = {
    "detr": Family(
        {
            "transformers DETR-R50 (SDPA)": partial(transformers_detector, "Detr"),
            "vitkit DETR-R50": partial(vitkit_model, detr_r50.config, is_padded=True),
            "torchvision Faster R-CNN R50-FPN": faster_rcnn,
        },
        **DETECTION,
    ),
    "deformable_detr": Family(
        {
            "transformers Deformable DETR-R50": partial(transformers_detector, "DeformableDetr", class_cost=2),
            "vitkit Deformable DETR-R50": partial(vitkit_model, deformable_detr.config, is_padded=True),
        },
        **DETECTION,
    ),
    "dino": Family(
        {
            "vitkit two-stage Deformable DETR-R50, 300 queries": partial(
                vitkit_model, partial(deformable_detr.config, refine_boxes=True, two_stage=True), is_padded=True
            ),
            "vitkit DINO-R50, 300 queries": partial(vitkit_model, dino_with_300_queries, is_padded=True),
            "vitkit DINO-R50, 900 queries": partial(vitkit_model, dino.config, is_padded=True),
        },
        cases=(Case(800, 1066), Case(800, 1066, training=True)),
        **DETECTION,
    ),
    "maskformer": Family(
        {
            "transformers MaskFormer-R50 (SDPA)": transformers_maskformer,
            "vitkit MaskFormer-R50": partial(vitkit_model, maskformer.config, **UNPADDED),
        },
        num_classes=150,
        **MASKS,
    ),
    "mask2former": Family(
        {
            "transformers Mask2Former-R50": transformers_mask2former,
            "vitkit Mask2Former-R50": partial(vitkit_model, mask2former.config, **UNPADDED),
        },
        num_classes=80,
        **MASKS,
    ),
    "eomt": Family(
        {"transformers EoMT-S (SDPA)": transformers_eomt, "vitkit EoMT-S": vitkit_eomt},
        num_classes=133,
        cases=[Case(640, 640)],
    ),
    "mae": Family(
        {"transformers MAE, ViT-B (SDPA)": transformers_mae, "vitkit MAE, ViT-B": vitkit_mae},
        num_classes=2,  # of targets that it does not read
        cases=[Case(224, 224, batch_size=8, training=True), Case(224, 224, batch_size=16, training=True)],
    ),
}
BACKBONE_FAMILIES = {
    "vit_base_patch16": backbone_family("vit_base_patch16", "vit_base_patch16_224"),
    "swin_tiny": backbone_family("swin_tiny", "swin_tiny_patch4_window7_224"),
    "swinv2_tiny": backbone_family("swinv2_tiny", "swinv2_tiny_window8_256", 256),
    "mvitv2_tiny": backbone_family("mvitv2_tiny", "mvitv2_tiny"),
}
