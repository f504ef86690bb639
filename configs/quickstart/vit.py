"""A small ViT on the synthetic world: which of six shapes is in the image. No download, minutes on a CPU.

The hybrid of the paper's section 3.1 (Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929): patches are cut from
the map of a small ResNet, since without it a transformer needs many more images (model_zoo/ablations/vit_parts.md).

Run:  python tools/train.py configs/quickstart/vit.py
      vitkit explain runs/vit --image image.png
Here: not yet run.
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
