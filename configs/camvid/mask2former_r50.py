"""mask2former.py from ImageNet weights, on images at full size: a ResNet-50 whose batch norms are frozen.

Run:  python tools/train.py configs/camvid/mask2former_r50.py data.root=DIR    (DIR holds images/ and labels/)
      From Keras's weights, as the figure: see configs/parts/resnet.py.
Here: mIoU 0.732, pixel accuracy 0.942, boundary mIoU 0.618 on val (seed 42, last epoch) in 57 min of one core of an AMD
      EPYC, 62 by the clock. After 6, 12 and 18 of 26 epochs: mIoU 0.483, 0.670, 0.718. IoU of poles is 0.18, of signs
      0.48, of pedestrians 0.52, of all other classes at least 0.64. Validation frames are 31 to 135 frames from frames
      in training: another recording is far harder, see held_out.py.
"""

from vitkit.configs.camvid.mask2former import config as mask2former
from vitkit.configs.parts.resnet import resnet50_for_transfer


def config():
    cfg = mask2former()
    cfg["model"]["backbone"] = resnet50_for_transfer(norm="frozen_bn", frozen_stages=1)
    cfg["data"]["train"]["transforms"].update(
        crop_size=[256, 256], short_sides=[252, 288, 324, 360, 396, 432, 468, 504, 540]
    )
    cfg["data"]["val"]["transforms"] = dict(type="EvalResize", short_side=360, max_size=480)
    cfg["optimizer"].update(lr=3e-4, backbone_lr=1e-4)
    cfg["schedule"]["warmup_steps"] = 150
    cfg["train"].update(precision="auto", epochs=26, eval_every=6, ema_decay=0.998)
    return cfg
