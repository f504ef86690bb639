"""LVIS v1 (Gupta et al. 2019, https://arxiv.org/abs/1908.03195): 1203 classes in the images of COCO 2017.

Its files are published at https://www.lvisdataset.org/dataset, and belong beside those of COCO:
    https://dl.fbaipublicfiles.com/LVIS/lvis_v1_train.json.zip
    https://dl.fbaipublicfiles.com/LVIS/lvis_v1_val.json.zip
minival, 4809 of the validation images, is that of MDETR, on which text-prompted detectors are compared:
    https://huggingface.co/GLIPModel/GLIP/resolve/main/lvis_v1_minival_inserted_image_name.json
"""


def lvis_detection(images_per_gpu=2, val="lvis_v1_val", root="data/coco"):
    return dict(
        root=root,
        images_per_gpu=images_per_gpu,
        # An image whose rarest class is in a fraction f of the images occurs sqrt(0.001 / f) times, at least once.
        sampler="repeat_factor",
        repeat_threshold=0.001,
        train=dict(
            type="LvisDetection",
            images="{root}",
            annotations="{root}/annotations/lvis_v1_train.json",
            bad_boxes="drop",
            transforms=dict(type="DETRTrainTransforms"),
        ),
        val=dict(
            type="LvisDetection",
            images="{root}",
            annotations=f"{{root}}/annotations/{val}.json",
            transforms=dict(type="EvalResize", short_side=800, max_size=1333),
        ),
    )
