"""EoMT-B (DINOv2, 640x640) on COCO 2017 instance segmentation (Kerssies et al. 2025, https://arxiv.org/abs/2503.19108).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/eomt_base_coco_instance.py train.precision=fp16
Reference: none published for this size. Here: not yet run.
"""

from vitkit.configs.eomt_base_coco_panoptic import config as base
from vitkit.configs.parts.coco_instance import coco_instance
from vitkit.configs.parts.eomt import fitted_to_square
from vitkit.configs.parts.panoptic import with_instances


def config():
    data = fitted_to_square(coco_instance(images_per_gpu=2), size=640)
    return with_instances(base(), data, dict(num_classes=80, things=None))
