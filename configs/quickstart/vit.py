"""A small ViT on the synthetic world: which of six shapes is in the image. No download, minutes on a CPU."""

from vitkit.configs.quickstart.classifier import config as classifier


def config():
    cfg = classifier()
    cfg["model"]["backbone"] = dict(
        type="ViT", patch_size=4, d_model=96, depth=6, num_heads=3, image_size=32, pretrained=False,
    )  # fmt: skip
    for split in ("train", "val"):
        cfg["data"][split].update(image_size=32, min_size=0.4, max_size=0.7)
    cfg["data"]["images_per_gpu"] = 32
    return cfg
