"""How D-FINE (Peng et al. 2024, https://arxiv.org/abs/2410.13842) and DEIM (Huang et al. 2024,
https://arxiv.org/abs/2412.04234) train on COCO 2017: squares, SSD's augmentation, a moving average that restarts.

Strong augmentation and squares of several sizes stop before the last epochs, which start from the best weights so far.
"""

from vitkit.configs.parts.coco import coco_detection

COLORS = dict(type="PhotometricDistort", p_each=0.5)
ZOOM_AND_CROP = [dict(type="RandomZoomOut", p=0.5, fill=0), dict(type="RandomIoUCrop", p=0.8)]


def dfine_data(strong_until, size=640, size_repeats=None, images_per_gpu=4, data=None):
    """D-FINE's data section.

    Args:
        strong_until: the epoch at which strong augmentation and squares of several sizes stop.
        size_repeats: how often `size` is among the sizes of squares; None: it is the only one.
        data: a data section with other datasets; None: COCO's.
    """
    transforms = dict(
        type="TransformsByEpoch",
        transforms=[_composed(COLORS, *ZOOM_AND_CROP), _composed()],
        until_epochs=[strong_until],
    )
    return _with_squares(data or coco_detection(images_per_gpu), transforms, size, size_repeats, strong_until)


def deim_data(
    mosaic_from,
    mosaic_until,
    strong_until,
    size=640,
    size_repeats=None,
    images_per_gpu=4,
    data=None,
    mosaic=0.5,
    mixup=0.5,
    copy_blend=0.0,
    copy_blend_until=None,
    min_box_side=1.0,
):
    """DEIM's data section: no augmentation, then with mosaics and mixup, then without those, then none again.

    Args:
        mosaic_from, mosaic_until: the epochs at which mosaics and mixup start and stop; from 0: there is no first part.
        strong_until, size_repeats, data: see `dfine_data`.
        mosaic, mixup: their probabilities.
        copy_blend, copy_blend_until: DEIMv2's CopyBlend: its probability, and the epoch at which it stops.
        min_box_side: boxes that augmentation makes smaller than this, in pixels, are dropped; above 1 also those that
            are smaller in the square.
    """
    strong = _composed(COLORS, *ZOOM_AND_CROP, min_box_side=min_box_side)
    mosaics = dict(
        type="GridMosaic", probability=mosaic, tile=size // 2, rotation=10.0, translation=0.1, scale=[0.5, 1.5],
        transforms=_composed(COLORS, min_box_side=min_box_side), otherwise=strong,
    )  # fmt: skip
    plain = _composed(min_box_side=min_box_side)
    transforms = dict(
        type="TransformsByEpoch",
        transforms=[*[plain] * bool(mosaic_from), mosaics, strong, plain],
        until_epochs=[*[mosaic_from] * bool(mosaic_from), mosaic_until, strong_until],
    )
    data = _with_squares(data or coco_detection(images_per_gpu), transforms, size, size_repeats, strong_until)
    if min_box_side > 1:
        data["squares"]["min_box_side"] = min_box_side
    if mixup:
        data["mixup"] = dict(probability=mixup, share=[0.45, 0.55], from_epoch=mosaic_from, until_epoch=mosaic_until)
    if copy_blend:
        data["copy_blend"] = dict(
            probability=copy_blend, num_objects=3, min_area=100.0, share=[0.45, 0.55], margin=[0.1, 0.25],
            from_epoch=mosaic_from, until_epoch=copy_blend_until,
        )  # fmt: skip
    return data


def training(epochs, strong_until, restart_ema_decay=0.9999, batch_size=32):
    """The train section of both.

    The run returns to its best average once, when strong augmentation stops, and the optimizer continues. The originals
    return to the whole state of the best epoch, the optimizer's included, and after that do so again after each
    evaluation that is not better, with a decay that is lower by 0.0001 each time.
    """
    return dict(
        epochs=epochs, precision="auto", clip_grad_norm=0.1, seed=42, reference_batch_size=batch_size,
        sync_batch_norm=True, ema_decay=0.9999, ema_ramp_steps=1000, restart_epoch=strong_until,
        restart_ema_decay=restart_ema_decay,
    )  # fmt: skip


def flat_cosine(mosaic_until, strong_until, warmup_steps=2000):
    """DEIM's schedule; D-FINE's is dict(type="ConstantLR", warmup_steps=500)."""
    return dict(
        type="FlatCosineLR", warmup_steps=warmup_steps, flat_until_epoch=mosaic_until, cosine_until_epoch=strong_until,
        end_factor=0.5,
    )  # fmt: skip


def square_sizes(size, repeats):
    """The sides of squares, in steps of 32 from three quarters to five quarters of `size`, which is there several times
    (0 for not at all)."""
    least, greatest = (int(size * factor / 32) * 32 for factor in (0.75, 1.25))
    return [*range(least, size, 32), *[size] * repeats, *range(greatest, size, -32)]


def _composed(*transforms, min_box_side=1.0):
    flip = dict(type="HorizontalFlip", p=0.5)
    return dict(type="ComposedTransforms", min_visible=0.0, min_box_side=min_box_side, transforms=[*transforms, flip])


def _with_squares(data, transforms, size, size_repeats, strong_until):
    data["train"]["transforms"] = transforms
    data["val"]["transforms"] = dict(type="EvalResize", size=[size, size])
    data["aspect_ratio_grouping"] = False
    data["squares"] = dict(sizes=[size])
    if size_repeats is not None:
        data["squares"] = dict(sizes=square_sizes(size, size_repeats), until_epoch=strong_until, final_size=size)
    return data
