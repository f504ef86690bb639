"""From DETR to DINO on 50 images of COCO, from ImageNet weights, at equal processor time.

The arms of detection_bccd.py, on https://github.com/lizhogn/tiny_coco_dataset: 49 of the 80 classes. As there are so
few images, objects of other images are pasted and images are jittered in scale. They teach nothing about the classes of
other photos (see model_zoo/README.md, "From ImageNet"), so the arms are evaluated on the training photos: how fast do
they learn these?

Run:  vitkit ablate detection_coco_tiny data.root=DIR    (other weights than torchvision's: see configs/parts/resnet.py)
Here: see model_zoo/ablations/detection_coco_tiny.md.
"""

from vitkit.configs.ablations.detection_bccd import ablation as bccd
from vitkit.configs.transfer.coco_tiny import config as coco_tiny


def ablation():
    ablation = bccd()
    data = coco_tiny()["data"]
    data["val"].update(
        images=data["train"]["images"], annotations=data["train"]["annotations"],
        masks=False,  # training needs masks to paste objects
    )  # fmt: skip
    data["train"]["transforms"]["transforms"]["size"] = 224
    data["val"]["transforms"] = dict(type="EvalResize", short_side=224, max_size=336)
    settings = {key: value for key, value in ablation["settings"].items() if not key.startswith("data.")}
    ablation["minutes"] = 1.5
    ablation["settings"] = settings | {
        "data.train": data["train"], "data.val": data["val"], "data.num_workers": 0, "data.images_per_gpu": 2,
    }  # fmt: skip
    return ablation
