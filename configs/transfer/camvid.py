"""A small Mask2Former on CamVid's road scenes, from ImageNet weights: configs/camvid/mask2former.py with a ResNet-50.

Run:  python tools/train.py configs/transfer/camvid.py data.root=DIR    (DIR holds images/ and labels/)
      From random weights: model.backbone.pretrained=false. From Keras's: see configs/parts/resnet.py.
Here: after 184 steps on crops of 128 pixels mIoU 0.397, pixel accuracy 0.844 (random weights: 0.204, 0.614), 2.1 min of
      one thread of an AMD EPYC beside much other work, bf16, torch 2.15.0, seed 42, with Keras's weights:
      train.epochs=2 train.eval_every=2 schedule.warmup_steps=30 train.precision=bf16
      data.train.transforms.crop_size=[128,128] data.train.transforms.short_sides=[120,136,152,168,184,200,216]
      data.val.transforms.short_side=160 data.val.transforms.max_size=240
"""

from vitkit.configs.camvid.mask2former import config as base
from vitkit.configs.parts.resnet import resnet50_for_transfer


def config():
    cfg = base()
    cfg["model"]["backbone"] = resnet50_for_transfer()
    cfg["optimizer"]["backbone_lr"] = 1e-4
    return cfg
