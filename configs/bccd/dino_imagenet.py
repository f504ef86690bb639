"""The recipe of dino_r18.py on a ResNet-50 with ImageNet weights that ends at stride 8.

Up to res3 a training step costs as much as with dino_r18.py's ResNet-18. The map of stride 16 is a convolution on the
one of stride 8. Cells need no more; photos of everyday objects do: on the 50 photos of COCO in
configs/start/detection.py this network has AP50 0.000 after as many steps as the one with res4, which has 0.008 to
0.045.

Run:  python tools/train.py configs/bccd/dino_imagenet.py data.root=DIR    (DIR holds images/ and annotations/)
Here: AP 0.616, AP50 0.890 on the 87 validation images, means of seeds 42 and 43 (AP 0.615 and 0.618); 37 min of one
      core of an AMD EPYC with AVX-512, evaluation not included; bf16, torch 2.14.1, from Keras's weights (see
      parts/resnet.py); 6592 steps. After 8, 16, 24, 32, 40, 48 and 56 of 64 epochs, 824 steps each: AP 0.482 (4 min),
      0.569 (9), 0.589 (14), 0.591 (18), 0.602 (23), 0.609 (27), 0.613 (32). So these weights help in the first ten
      minutes; from 15 min on, dino_r18.py is as good. Evaluated in 256 pixels: 0.599 (seed 42).
      Up to res4 with frozen batch norms, as in configs/start/detection.py, 11.1 M parameters, a step takes 1.9 times as
      long and more is learned from each: AP 0.571 after 17 min, 0.616 (35), 0.627 (44), 0.632, AP50 0.902 (71; seeds 42
      and 43: AP 0.637 and 0.627).
      In 272 pixels, trained on 224 to 288, 60 epochs, 47 min: AP 0.609, AP50 0.888; evaluated in 304, which is a choice
      on these images (288 and 336 give 0.611 and 0.614): 0.626, 0.897.
"""

from vitkit.configs.bccd.dino_r18 import config as dino_r18
from vitkit.configs.parts.resnet import resnet50_for_transfer


def config():
    cfg = dino_r18()
    cfg["model"]["backbone"] = resnet50_for_transfer(norm="bn", out_features=["res3"], frozen_stages=1)
    cfg["model"]["neck"]["num_levels"] = 2
    cfg["optimizer"]["backbone_lr"] = 2e-4
    return cfg
