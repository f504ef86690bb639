"""From DETR to DINO on 50 images of COCO, from random weights: the arms of detection_coco_tiny.py.

With the backbone and learning rate of detection_bccd_random.py.

Run:  vitkit ablate detection_coco_tiny_random data.root=DIR
Here: see model_zoo/ablations/detection_coco_tiny_random.md.
"""

from vitkit.configs.ablations.detection_bccd_random import ablation as bccd_random
from vitkit.configs.ablations.detection_coco_tiny import ablation as from_imagenet


def ablation():
    ablation, random = from_imagenet(), bccd_random()
    data = {key: value for key, value in ablation["settings"].items() if key.startswith("data.")}
    others = {key: value for key, value in random["settings"].items() if not key.startswith("data.")}
    ablation["base"] = random["base"]
    ablation["settings"] = others | data | {"data.images_per_gpu": 4}
    return ablation
