"""A small Mask2Former on CamVid's road scenes, from ImageNet weights: configs/camvid/mask2former.py with a ResNet-50.

Run:  python tools/train.py configs/transfer/camvid.py data.root=DIR    (DIR holds images/ and labels/)
      From random weights: model.backbone.pretrained=false. From Keras's: see configs/parts/resnet.py.
Here: see model_zoo/README.md, "From ImageNet".
"""

from vitkit.configs.camvid.mask2former import config as base
from vitkit.configs.parts.resnet import resnet50_for_transfer


def config():
    cfg = base()
    cfg["model"]["backbone"] = resnet50_for_transfer()
    cfg["optimizer"]["backbone_lr"] = 1e-4
    return cfg
