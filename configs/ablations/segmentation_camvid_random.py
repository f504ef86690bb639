"""From per-pixel classification to Mask2Former and EoMT on CamVid, all from random weights.

Run:  vitkit ablate segmentation_camvid_random data.root=DIR
Here: see model_zoo/ablations/segmentation_camvid_random.md.
"""

from vitkit.configs.ablations.segmentation_camvid import ablation as from_imagenet


def ablation():
    made = from_imagenet()
    made["settings"]["model.backbone.pretrained"] = False
    return made
