"""A small ViT on the synthetic world: which of six shapes is in the image. No download, minutes on a CPU.

The hybrid of the paper's section 3.1 (Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929): patches are cut from
the map of a small ResNet, since without it a transformer needs many more images (model_zoo/ablations/vit_parts.md).

Run:  python tools/train.py configs/quickstart/vit.py
      vitkit explain runs/vit --image image.png
Here: top-1 1.000 of 1000 images for seed 42; 8.0 processor minutes of an AMD EPYC, one thread. The class token of the
      first block attends to the box with 0.70 to 0.99 of its weight, by head, and that of the last block with 0.44 to
      0.62; boxes take 0.31 of the area (200 validation images).
      These weights are in the package: `vitkit explain shapes_vit --image image.png`.
"""

from vitkit.configs.quickstart.classifier import config as classifier


def config():
    cfg = classifier()
    cfg["model"]["backbone"] = dict(
        type="ViT", image_size=64, patch_size=8, d_model=96, depth=4, num_heads=3, pretrained=False,
        stem=dict(type="ResNet", depth=18, base_channels=32, out_features=["res2"], pretrained=False),
    )  # fmt: skip
    cfg["data"]["images_per_gpu"] = 32
    cfg["optimizer"]["lr"] = 5e-4
    cfg["train"].update(epochs=15, reference_batch_size=32)
    return cfg
