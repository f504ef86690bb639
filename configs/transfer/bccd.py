"""A small two-stage Deformable DETR on blood cells (https://github.com/Shenggan/BCCD_Dataset), from ImageNet weights.

configs/bccd/deformable_detr.py with a ResNet-50, which would not be worthwhile from random weights with 205 images.

Run:  python tools/train.py configs/transfer/bccd.py data.root=DIR    (DIR holds images/ and annotations/)
      From random weights: model.backbone.pretrained=false. From Keras's: see configs/parts/resnet.py.
Here: see model_zoo/README.md, "From ImageNet".
"""

from vitkit.configs.bccd.deformable_detr import config as base
from vitkit.configs.parts.resnet import resnet50_for_transfer


def config():
    cfg = base()
    cfg["model"]["backbone"] = resnet50_for_transfer(out_features=["res3", "res4"])
    cfg["optimizer"]["backbone_lr"] = 1e-4
    return cfg
