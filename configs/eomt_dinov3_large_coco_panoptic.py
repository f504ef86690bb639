"""EoMT-L on DINOv3 (640x640), COCO 2017 panoptic segmentation (Kerssies et al. 2025, https://arxiv.org/abs/2503.19108).

The backbone is DINOv3's ViT-L/16, whose rotary positions are rescaled at random in training, as in its pretraining.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/eomt_dinov3_large_coco_panoptic.py train.precision=fp16
Reference: its original publishes weights as differences from DINOv3's. Here: not yet run.
"""

from vitkit.configs.eomt_large_coco_panoptic import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"] = dict(
        type="vit_large_patch16_dinov3_qkvb", image_size=640, rotary_rescale=2.0, pretrained=True
    )
    cfg["optimizer"].update(lr=2e-4, full_rate_blocks=4)
    cfg["schedule"].update(warmup_steps=2000, backbone_warmup_steps=3000)
    return cfg
