"""A small DINO on a ResNet-18 on blood cells (https://github.com/Shenggan/BCCD_Dataset), from random weights.

Run:  python tools/train.py configs/bccd/dino_r18.py data.root=DIR    (DIR holds images/ and annotations/)
Here: not yet run.
"""

from vitkit.configs.bccd.deformable_detr import config as deformable_detr


def config(epochs=48, mosaics_until=28):
    cfg = deformable_detr()
    cfg["model"].update(
        type="DINO", num_queries=80, num_detections=100,
        head=dict(
            type="DINOHead", d_model=128, num_heads=8, d_ffn=512, num_encoder_layers=1, num_decoder_layers=3,
            share_heads=False,
        ),
        training_queries=[dict(type="BoxDenoising", num_queries=40)],
    )  # fmt: skip
    cfg["criterion"].update(class_loss="mal", weights=dict(labels=1.0, l1=5.0, giou=2.0))
    single = cfg["data"]["train"]["transforms"]
    single.update(min_visible=0.2, min_box_side=2.0)
    single["transforms"][2].update(
        scales=[192, 224, 256], max_size=360, crop_scales=[272, 320, 368], crop_range=[176, 256]
    )
    cfg["data"]["train"]["transforms"] = dict(
        type="TransformsByEpoch", until_epochs=[mosaics_until],
        transforms=[dict(type="MultiImageTransforms", mosaic=0.3, transforms=single), single],
    )  # fmt: skip
    cfg["data"]["val"]["transforms"] = dict(type="EvalResize", short_side=240, max_size=400)
    cfg["data"].update(images_per_gpu=2, num_workers=0)
    cfg["optimizer"] = dict(type="AdamW", lr=5e-4, weight_decay=1e-4)
    cfg["schedule"] = dict(type="FlatCosineLR", warmup_steps=200, flat_until_epoch=mosaics_until, end_factor=0.02)
    cfg["train"].update(
        precision="auto", epochs=epochs, eval_every=8, best_metric="bbox/AP", reference_batch_size=2,
        ema_decay=0.999, ema_ramp_steps=500,
    )  # fmt: skip
    return cfg
