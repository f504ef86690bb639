"""From DETR to DINO on blood cells, from random weights: the arms of detection_bccd.py.

With a ResNet-18 whose batch norms are trained: a larger backbone from random weights learns next to nothing in minutes.

Run:  vitkit ablate detection_bccd_random data.root=DIR
Here: see model_zoo/ablations/detection_bccd_random.md.
"""

from vitkit.configs.ablations.detection_bccd import ablation as from_imagenet


def ablation():
    ablation = from_imagenet()
    ablation["base"] = "bccd/deformable_detr"
    settings = ablation["settings"]
    settings.update({"data.images_per_gpu": 4, "optimizer.lr": 3e-4, "train.reference_batch_size": 4})
    del settings["model.backbone.norm"], settings["model.backbone.frozen_stages"]
    return ablation
