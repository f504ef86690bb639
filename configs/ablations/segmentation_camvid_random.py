"""From per-pixel classification to Mask2Former and EoMT on CamVid, from random weights: the arms of
segmentation_camvid.py, with a ResNet-18 whose batch norms are trained.

Run:  vitkit ablate segmentation_camvid_random data.root=DIR
Here: see model_zoo/ablations/segmentation_camvid_random.md.
"""

from vitkit.configs.ablations.segmentation_camvid import ablation as from_imagenet


def ablation():
    ablation = from_imagenet()
    del ablation["settings"]["model.backbone"], ablation["settings"]["optimizer.backbone_lr"]
    return ablation
