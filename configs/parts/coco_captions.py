"""COCO 2017 captions (Chen et al. 2015, https://arxiv.org/abs/1504.00325), five for each of 118,287 + 5,000 images.

train2017/*.jpg  val2017/*.jpg  annotations/captions_train2017.json  annotations/captions_val2017.json
"""


def coco_captions(images_per_gpu=32, size=384, crop_scale=(0.7, 1.0), min_count=5, root="data/coco"):
    def split(name, **others):
        return dict(
            type="CocoCaptions",
            images=f"{{root}}/{name}2017",
            annotations=f"{{root}}/annotations/captions_{name}2017.json",
            **others,
        )

    evaluated = dict(type="ClassificationEvalTransforms", size=size, crop_pct=1.0, interpolation="bicubic")
    augmented = dict(type="ClassificationTrainTransforms", size=size, scale=list(crop_scale))
    return dict(
        root=root,
        images_per_gpu=images_per_gpu,
        val_images_per_gpu=images_per_gpu,
        num_workers=8,
        aspect_ratio_grouping=False,
        train=split("train", min_count=min_count, transforms=augmented),
        val=split("val", transforms=evaluated),
    )
