"""A small two-stage Deformable DETR on blood cells (https://github.com/Shenggan/BCCD_Dataset), from ImageNet weights.

configs/bccd/deformable_detr.py with a ResNet-50, which would not be worthwhile from random weights with 205 images.

Run:  python tools/train.py configs/transfer/bccd.py data.root=DIR    (DIR holds images/ and annotations/)
      From random weights: model.backbone.pretrained=false. From Keras's: see configs/parts/resnet.py.
Here: after 208 steps on images of 160 to 192 pixels AP 0.193, AP50 0.491 (random weights: 0.049, 0.211), 3.6 min of one
      thread of an AMD EPYC beside much other work, bf16, torch 2.15.0, seed 42, with Keras's weights:
      train.epochs=4 train.eval_every=4 schedule.warmup_steps=50 train.precision=bf16
      data.train.transforms.transforms.2.scales=[160,176,192] data.train.transforms.transforms.2.crop_scales=[224,256]
      data.train.transforms.transforms.2.crop_range=[160,208] data.val.transforms.short_side=176
"""

from vitkit.configs.bccd.deformable_detr import config as base
from vitkit.configs.parts.resnet import resnet50_for_transfer


def config():
    cfg = base()
    cfg["model"]["backbone"] = resnet50_for_transfer(out_features=["res3", "res4"])
    cfg["optimizer"]["backbone_lr"] = 1e-4
    return cfg
