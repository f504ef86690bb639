"""dino_r18.py for a quarter of an hour of a processor: small images first.

For six tenths of the run images have 128 rather than 224 pixels, where a step costs half as much.

Run:  python tools/train.py configs/bccd/small_first.py data.root=DIR    (DIR holds images/ and annotations/)
"""

from copy import deepcopy

from vitkit.configs.bccd.dino_imagenet import config as dino_imagenet
from vitkit.configs.bccd.dino_r18 import config as dino_r18


def config(imagenet=False):
    """Return the config; with `imagenet`, on a ResNet-50 up to res3 from ImageNet's weights (dino_imagenet.py)."""
    cfg = dino_imagenet() if imagenet else dino_r18()
    large = cfg["data"]["train"]["transforms"]["transforms"][1]
    small = deepcopy(large)
    small["transforms"][2].update(
        scales=[112, 128, 128], max_size=229, crop_scales=[146, 165, 192], crop_range=[91, 128]
    )
    cfg["data"]["train"]["transforms"]["transforms"][0]["transforms"] = small  # of the mosaics
    cfg["schedule"] = dict(type="FlatCosineLR", warmup_share=0.05, flat_until_share=0.6, end_factor=0.02)
    cfg["train"].update(epochs=19, eval_every=19)
    return cfg
