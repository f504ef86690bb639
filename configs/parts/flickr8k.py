"""Flickr8k (Hodosh et al. 2013), 6,000 + 1,000 + 1,000 photos with five captions each, in COCO's caption files.

    images/*.jpg  annotations/captions_train.json  annotations/captions_val.json

Photos of Flickr users, only for research and education. Karpathy's `dataset_flickr8k.json` has the splits.
"""


def flickr8k(
    images_per_gpu=32, size=224, crop_scale=(0.7, 1.0), flip_probability=0.5, min_count=5, root="data/flickr8k"
):
    def split(name, **others):
        return dict(
            type="CocoCaptions",
            images="{root}/images",
            annotations=f"{{root}}/annotations/captions_{name}.json",
            **others,
        )

    evaluated = dict(type="ClassificationEvalTransforms", size=size, crop_pct=1.0, interpolation="bilinear")
    augmented = dict(
        type="ClassificationTrainTransforms", size=size, scale=list(crop_scale), interpolation="bilinear",
        flip_probability=flip_probability,
    )  # fmt: skip
    return dict(
        root=root,
        images_per_gpu=images_per_gpu,
        val_images_per_gpu=images_per_gpu,
        aspect_ratio_grouping=False,
        train=split("train", min_count=min_count, transforms=augmented),
        val=split("val", transforms=evaluated),
    )
