"""Compare real-time detectors with transformers' at the images that they are made for; weights, images and targets are
random.

transformers' training step leaves out D-FINE's union of matchings, and computes half of its local terms: it does less.
"""

from functools import partial

from torch import Tensor

from vitkit.configs import rtdetr_r18, rtdetr_r50
from vitkit.tools.benchmark.models import (
    Batch,
    Case,
    Contestant,
    Family,
    compare_family,
    import_transformers,
    vitkit_model,
)
from vitkit.tools.benchmark.timing import Options, Row

RESNETS = {
    18: dict(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512]),
    50: dict(layer_type="bottleneck", depths=[3, 4, 6, 3], hidden_sizes=[256, 512, 1024, 2048]),
}
"""Depth -> transformers' settings of the backbone."""
RT_DETRS = {
    18: dict(hidden_expansion=0.5, decoder_layers=3, freeze_backbone_batch_norms=False),
    50: dict(hidden_expansion=1.0, decoder_layers=6, freeze_backbone_batch_norms=True),
}
"""Depth -> transformers' settings of the neck and the decoder."""


def transformers_rt_detr(depth: int, num_classes: int, batch: Batch, case: Case) -> Contestant:
    """Build transformers' RT-DETR with its loss on the batch, denoising included."""
    transformers = import_transformers()
    backbone = transformers.RTDetrResNetConfig(**RESNETS[depth], out_indices=[2, 3, 4])
    config = transformers.RTDetrConfig(
        backbone_config=backbone,
        encoder_in_channels=RESNETS[depth]["hidden_sizes"][1:],
        num_labels=num_classes,
        **RT_DETRS[depth],
    )
    return contestant(transformers.RTDetrForObjectDetection(config), batch)


def contestant(model, batch: Batch) -> Contestant:
    """Return a detector of transformers with its loss on the batch."""
    targets = [dict(class_labels=labels, boxes=boxes) for labels, boxes in zip(batch.labels, batch.boxes_cxcywh)]

    def loss() -> Tensor:
        return model(batch.images, labels=targets).loss

    return Contestant(model, loss, lambda: model(batch.images))


FAMILIES = {
    f"rtdetr_r{depth}": Family(
        {
            f"transformers RT-DETR-R{depth}": partial(transformers_rt_detr, depth),
            f"vitkit RT-DETR-R{depth}": partial(vitkit_model, config, is_padded=False),
        },
        num_classes=80,
        clip_grad_norm=0.1,
        cases=(Case(640, 640), Case(640, 640, batch_size=4, training=True)),
    )
    for depth, config in ((18, rtdetr_r18.config), (50, rtdetr_r50.config))
}


def measure(part: str, options: Options) -> list[Row]:
    """Measure all contestants of a family on each case; see `models`."""
    families = {name: family for name, family in FAMILIES.items() if name.startswith(part)}
    return [
        row
        for name, family in families.items()
        for case in family.cases
        for row in compare_family(family, case, options, what=f"{name}, {case}")
    ]
