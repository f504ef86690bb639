"""ECSeg on COCO 2017 (EdgeCrafter, https://arxiv.org/abs/2603.18739): ECDet with RF-DETR-Seg's masks, other weights of
the losses, and longer training of M.

In inference, the original applies only the first of the blocks that update the map for each decoder layer, although the
last layer's masks are trained with all of them: so does this config. `model.head.masks.one_block=false` applies all.

Run:       torchrun --nproc-per-node 8 tools/train.py ecseg_s_coco
Reference: the original README; parameters are with 80 classes, counted by the original's configs. Here: not yet run.
License:   see configs/ecdet.py.
Backbones: files of the release edgecrafterv1 that were trained for segmentation.
"""

from typing import Literal

from vitkit.configs.ecdet import TRAINING as ECDET
from vitkit.configs.ecdet import trained_detector
from vitkit.configs.parts.masks import with_masks

VARIANTS = {
    "ecseg_s_coco": (dict(size="s"), "43.0 mask AP, 74 epochs; 10,411,909 parameters"),
    "ecseg_m_coco": (dict(size="m"), "45.2 mask AP, 74 epochs; 20,364,621 parameters"),
    "ecseg_l_coco": (dict(size="l"), "47.1 mask AP, 50 epochs; 33,899,229 parameters"),
    "ecseg_x_coco": (dict(size="x"), "48.4 mask AP, 50 epochs; 50,875,101 parameters"),
}
"""Name -> arguments of `config`, and what is published. The original counts two settings as parameters, `up` and
`reg_scale`."""

TRAINING = ECDET | dict(m=ECDET["s"], l=ECDET["l"] | dict(backbone_lr=2.5e-6))
"""Size -> the optimizer's settings, and the epochs of `deim_data`."""


def config(size: Literal["s", "m", "l", "x"] = "s"):
    cfg = trained_detector(size, TRAINING[size])
    backbone = cfg["model"]["backbone"]
    backbone["pretrained"] = backbone["pretrained"].replace("ecvit", "ecseg_vit")
    cfg["criterion"]["weights"].update(labels=2.0, l1=1.0, giou=1.0)
    cfg["criterion"]["matcher"].update(cost_l1=1.0, cost_giou=1.0)
    masks = dict(type="BlockMasks", one_block=True, initial=True)
    return with_masks(cfg, masks, point_padding="zeros")
