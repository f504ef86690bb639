"""From DETR to DINO on blood cells, from random weights: the measure for detection_bccd.py beside it.

Run:  vitkit ablate detection_bccd_random data.root=DIR
Here: see model_zoo/ablations/detection_bccd_random.md.
"""

from vitkit.configs.ablations.detection_bccd import ablation as from_imagenet


def ablation():
    made = from_imagenet()
    made["settings"]["model.backbone.pretrained"] = False
    return made
