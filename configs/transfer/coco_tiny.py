"""A small Mask2Former on the instances of a few images of COCO (https://github.com/lizhogn/tiny_coco_dataset), from
ImageNet weights: 50 training images, 49 of the 80 classes.

As there are so few images, objects of other images are pasted and images are jittered in scale.

Run:  python tools/train.py configs/transfer/coco_tiny.py data.root=DIR    (DIR holds train2017/ val2017/ annotations/)
      From random weights: model.backbone.pretrained=false. From Keras's: see configs/parts/resnet.py.
Here: one run of 40 epochs at 192 pixels: mask AP 0.001 on other photos, 0.093 on the training photos, of which 50 are
      too few for 49 classes. From random weights 0.000 and 0.002. 7.1 min of one thread, torch 2.14.1, with:
      train.epochs=40 train.eval_every=20 schedule.warmup_steps=50 train.precision=bf16 data.num_workers=0
      data.train.transforms.transforms.size=192 data.val.transforms.short_side=192 data.val.transforms.max_size=288
"""

from vitkit.configs.overfit.coco_instance import config as base
from vitkit.configs.parts.coco_instance import coco_instance
from vitkit.configs.parts.resnet import resnet50_for_transfer


def config():
    cfg = base()
    cfg["model"]["backbone"] = resnet50_for_transfer(out_features=["res2", "res3", "res4"])
    cfg["data"] = coco_instance(images_per_gpu=4, size=320)
    cfg["data"]["train"]["transforms"] = dict(
        type="MultiImageTransforms", copy_paste=0.5,
        transforms=dict(
            type="LargeScaleJitter", size=320, scale_range=[0.5, 2.0], min_visible=0.1, min_box_side=2.0,
        ),
    )  # fmt: skip
    cfg["data"]["val"]["transforms"] = dict(type="EvalResize", short_side=320, max_size=480)
    cfg["data"]["val"]["bad_boxes"] = "drop"
    cfg["data"]["num_workers"] = 1
    cfg["optimizer"].update(backbone_lr=1e-4, weight_decay=0.05)
    cfg["train"].update(epochs=100, eval_every=25, reference_batch_size=4)
    return cfg
