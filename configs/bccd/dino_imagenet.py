"""The recipe of dino_r18.py on a ResNet-50 with ImageNet weights that ends at stride 8.

Up to res3 a training step costs as much as with dino_r18.py's ResNet-18. The map of stride 16 is a convolution on the
one of stride 8. Cells need no more; photos of everyday objects do: on the 50 photos of COCO in
configs/start/detection.py this network has AP50 0.000 after as many steps as the one with res4, which has 0.045.

Run:  python tools/train.py configs/bccd/dino_imagenet.py data.root=DIR    (DIR holds images/ and annotations/)
Here: AP 0.626, AP50 0.897, AP75 0.677 (seed 42) on the 87 validation images in 304 pixels, and 0.609, 0.888, 0.674 in
      the 272 that it is evaluated in while it trains; 288, 304 and 336 were tried (0.611, 0.626, 0.614), so the best is
      a choice on these images. 47 min of one core of an AMD EPYC with AVX-512, evaluation not included; bf16, torch
      2.14.1, from Keras's weights (see parts/resnet.py). After 6, 12, 24, 36 and 48 of 60 epochs, in 272 pixels: AP
      0.504 (4.6 min), 0.544 (9), 0.583 (18), 0.594 (28), 0.607 (37). dino_r18.py in 304 pixels: 0.615, 0.893.
"""

from vitkit.configs.bccd.dino_r18 import config as dino_r18
from vitkit.configs.parts.resnet import resnet50_for_transfer


def config():
    cfg = dino_r18()
    cfg["model"]["backbone"] = resnet50_for_transfer(norm="bn", out_features=["res3"], frozen_stages=1)
    cfg["model"]["neck"]["num_levels"] = 2
    cfg["optimizer"]["backbone_lr"] = 2e-4
    return cfg
