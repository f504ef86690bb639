"""A small EoMT on the synthetic world, a mask for every thing and for the ground: no download, minutes on a CPU.

A plain ViT from random weights with patches of 8 pixels, of whose six blocks the last three process the queries. Masked
attention is phased out as in the original.

Run:  python tools/train.py configs/quickstart/eomt.py
Here: not yet run in full. 120 steps of 4 images (data.train.num_images=480, train.epochs=1, schedule.warmup_steps=10)
      take the training loss from 45 to 24.
"""

from vitkit.configs.quickstart.mask2former_panoptic import config as mask2former_panoptic


def config():
    cfg = mask2former_panoptic()
    cfg["model"] = dict(
        type="EoMT", tasks=["panoptic"], num_queries=12, num_blocks=3,
        backbone=dict(
            type="ViT", patch_size=8, d_model=128, depth=6, num_heads=4, image_size=96, num_registers=4,
            positions="patches", layer_scale=0.1, pretrained=False,
        ),
    )  # fmt: skip
    cfg["train"]["hooks"] = [dict(type="MaskAnnealing")]
    return cfg
