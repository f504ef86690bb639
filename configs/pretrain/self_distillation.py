"""DINO (Caron et al. 2021, https://arxiv.org/abs/2104.14294): a backbone learns without labels, from a moving average
of itself that sees other crops of the same images. (The detector of that name is configs/dino.py.)

On ImageNet the classes of the validation images only serve to tell, by the nearest neighbors, what the features are
worth. On any images, such as a folder's:
vitkit train pretrain/self_distillation:data=FOLDER,images_per_step=256,momentum=0.9995 (config's arguments).

Run:       torchrun --nproc-per-node 8 tools/train.py dino_vit_s16_in1k_100ep
           On any number of GPUs a step has the same images, by accumulation. A detector takes the result as
           model.backbone.pretrained=runs/dino_vit_s16_in1k_100ep.
Reference: top-1 of a linear classifier, and of the nearest neighbors, on frozen features (original README). The names
           with an end are its commands. The others are those of the published weights (Apache-2.0): their epochs and
           crops are as in the files `args` beside these weights, as far as known here; compare them before a long run.
           The published ResNet-50 had 4080 images in a step.
Here:      not yet run on ImageNet; on small images: configs/quickstart/self_distillation.py.
"""

_LONG = dict(teacher_temperature=0.07, num_small=10, scale=[0.25, 1.0], small_scale=[0.05, 0.25], images_per_step=1024)
_RESNET = dict(backbone="resnet50", scale=[0.14, 1.0], small_scale=[0.05, 0.14])
VARIANTS = {
    "dino_vit_s16_in1k": (
        dict(**_LONG, epochs=800, warmup_epochs=30, norm_last_layer=False), "77.0 top-1 linear, 74.5 k-NN"
    ),
    "dino_vit_s8_in1k": (
        dict(**_LONG, backbone="vit_small_patch8_dino", epochs=800, warmup_epochs=30, norm_last_layer=False),
        "79.7 top-1 linear, 78.3 k-NN",
    ),
    "dino_vit_b16_in1k": (
        dict(**_LONG, backbone="vit_base_patch16_dino", epochs=400, warmup_epochs=50), "78.2 top-1 linear, 76.1 k-NN"
    ),
    "dino_vit_b8_in1k": (
        dict(**_LONG, backbone="vit_base_patch8_dino", epochs=300, warmup_epochs=50), "80.1 top-1 linear, 77.4 k-NN"
    ),
    "dino_r50_in1k": (dict(**_RESNET, epochs=800), "75.3 top-1 linear, 67.5 k-NN"),
    "dino_vit_s16_in1k_100ep": (dict(), "74.0 top-1 linear, 69.3 k-NN"),
    "dino_vit_s16_in1k_300ep": (
        dict(epochs=300, teacher_temperature=0.07, warmup_epochs=30, norm_last_layer=False, images_per_step=1024),
        "76.0 top-1 linear, 73.3 k-NN",
    ),
    "dino_r50_in1k_100ep": (_RESNET, "none published, except for a log of the loss"),
}  # fmt: skip
"""Name -> arguments of `config`, and what is published."""


def config(
    backbone: str = "vit_small_patch16_dino",
    data: str | None = None,
    size: int = 224,
    small_size: int = 96,
    num_small: int = 8,
    scale: tuple[float, float] = (0.4, 1.0),
    small_scale: tuple[float, float] = (0.05, 0.4),
    epochs: int = 100,
    images_per_step: int = 512,
    momentum: float = 0.996,
    teacher_temperature: float = 0.04,
    warmup_epochs: int = 0,
    norm_last_layer: bool = True,
    num_prototypes: int | None = None,
):
    """Return the config of a backbone.

    Args:
        data: a folder, or what else `UnlabeledImages` takes; None: ImageNet.
        momentum: of the teacher; 0.9995 for steps of 256 images.
        warmup_epochs: epochs until `teacher_temperature`, from 0.04.
        num_prototypes: None: 65,536 for ImageNet, 4096 for `data`, which may be much smaller.
    """
    crops = dict(
        type="MultiCrop", size=size, small_size=small_size, num_small=num_small, scale=list(scale),
        small_scale=list(small_scale),
    )  # fmt: skip
    whole = dict(type="ClassificationEvalTransforms", size=size, interpolation="bicubic")
    source = "{root}/train" if data is None else data
    is_resnet = "resnet" in backbone
    cfg = dict(
        model=dict(
            type="SelfDistillation", norm_last_layer=norm_last_layer,
            num_prototypes=num_prototypes or (65536 if data is None else 4096),
            backbone=_network(backbone, size),
        ),
        criterion=dict(type="SelfDistillationLoss"),
        data=dict(
            root="data/imagenet", images_per_gpu=8 if "patch8" in backbone else 64, val_images_per_gpu=125,
            num_workers=8,
            train=dict(type="UnlabeledImages", source=source, transforms=crops),
            val=dict(type="ImageFolder", folder="{root}/val", transforms=whole),
        ),
        evaluator=dict(type="NearestNeighbors"),
        train=dict(
            epochs=epochs, images_per_step=images_per_step, reference_batch_size=images_per_step,
            # Small patches make half precision unstable.
            precision="fp32" if "patch8" in backbone else "auto",
            hooks=[
                dict(
                    type="SelfDistillationSchedules", momentum=momentum, teacher_temperature=teacher_temperature,
                    warmup_epochs=warmup_epochs, final_weight_decay=1e-4 if is_resnet else 0.4,
                )
            ],
            eval_every=min(10, epochs), best_metric="knn/top1",
        ),
    )  # fmt: skip
    rate = images_per_step / 256
    if is_resnet:
        lr = 0.03 * rate
        cfg["optimizer"] = dict(type="SGD", lr=lr, momentum=0.9, weight_decay=1e-4, no_weight_decay=["vectors"])
    else:
        lr = 5e-4 * rate
        cfg["optimizer"] = dict(type="AdamW", lr=lr, weight_decay=0.04, no_weight_decay=["vectors"])
    cfg["schedule"] = dict(type="CosineLR", warmup_epochs=min(10, epochs / 10), end_factor=1e-6 / lr)
    if data is not None:
        cfg["data"]["val"] = dict(type="UnlabeledImages", source=source, transforms=whole)
        cfg["evaluator"] = dict(type="FeatureStatistics")
        cfg["train"]["best_metric"] = None  # an early state may have features of a higher rank, and be worse
    return cfg


def _network(name: str, size: int) -> dict:
    if name.startswith("vit_"):
        return dict(type=name, image_size=size, drop_path=0.1, position_offset=0.1)
    return dict(type=name, pretrained=False)
