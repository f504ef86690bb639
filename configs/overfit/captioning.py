"""Show, Attend and Tell overfits the captions of Flickr8k's first fifty training images.

It is evaluated on the images that it was trained on, and the backbone starts from random weights. If such a run on your
own data stays far below the result here, something is wrong with the data or the settings; a lack of images is not the
reason.

Run:  python tools/train.py configs/overfit/captioning.py data.root=data/flickr8k
Here: CIDEr-D 2.57 and BLEU-4 0.873 against five references each, for seed 42, in 2 min of one core's processor time. A
      caption that is one of the five gets 2 from that one.
"""

from vitkit.configs.show_attend_tell import config as show_attend_tell


def config():
    cfg = show_attend_tell()
    images = dict(
        type="CocoCaptions", first=50, images="{root}/images", annotations="{root}/annotations/captions_train.json",
        transforms=dict(type="ClassificationEvalTransforms", size=96, crop_pct=1.0, interpolation="bilinear"),
    )  # fmt: skip
    cfg["model"] |= dict(
        backbone=dict(type="resnet18", pretrained=False, out_features=["res4"]), freeze_backbone=False,
        d_embedding=256, d_model=384, d_attention=256, dropout=0.0,
    )  # fmt: skip
    cfg["data"] = dict(
        train=dict(**images, min_count=1), val=images, root="data/flickr8k", images_per_gpu=10, val_images_per_gpu=50,
        num_workers=0, aspect_ratio_grouping=False,
    )  # fmt: skip
    cfg["optimizer"] = dict(type="AdamW", lr=7e-4, weight_decay=0.0)
    cfg["schedule"] = dict(type="CosineLR", warmup_steps=20)
    cfg["train"] = dict(epochs=120, eval_every=60, log_every=50, clip_grad_norm=5.0, best_metric="CIDEr-D")
    return cfg
