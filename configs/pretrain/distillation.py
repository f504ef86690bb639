"""Feature distillation: a backbone of any kind learns the features of a frozen one from images without labels.

This is the simplest form of what AM-RADIO (Ranzinger et al. 2023, https://arxiv.org/abs/2312.06709) does with several
teachers: one minus the cosine at each location and of each image. Student and teacher see the same random crop, as a
teacher has to be "patient and consistent" (Beyer et al. 2021, https://arxiv.org/abs/2106.05237): many epochs help.

On ImageNet the classes of the validation images only serve to tell, by the nearest neighbors, what the features are
worth. On any images, such as a folder's, the loss and cosines on the same images without crops take their place:
vitkit train pretrain/distillation:backbone=resnet18,teacher=resnet50,data=FOLDER,images_per_step=32 (config's
arguments).

Run:       torchrun --nproc-per-node 8 tools/train.py distil_r50_dinov2_base_in1k
           A detector takes the result as model.backbone.pretrained=runs/distil_r50_dinov2_base_in1k.
Reference: none published for this form.
Here:      not yet run on ImageNet; beginnings on 205 photos: README.md. On small images:
           configs/quickstart/distillation.py.
"""

VARIANTS = {
    "distil_r50_dinov2_base_in1k": (
        dict(backbone="resnet50", teacher="vit_base_patch14_dinov2"), "none published for this form"
    ),
    "distil_r18_r50_in1k": (dict(backbone="resnet18", teacher="resnet50"), "none published for this form"),
    "distil_vit_s16_dino_b16_in1k": (
        dict(backbone="vit_small_patch16", teacher="vit_base_patch16_dino"), "none published for this form"
    ),
    "distil_swin_tiny_dinov2_base_in1k": (
        dict(backbone="swin_tiny", teacher="vit_base_patch14_dinov2"), "none published for this form"
    ),
}  # fmt: skip
"""Name -> arguments of `config`, and what is published."""


def config(
    backbone: str = "resnet50",
    teacher: str | dict = "vit_base_patch14_dinov2",
    data: str | None = None,
    size: int = 224,
    epochs: int = 100,
    images_per_step: int = 256,
    lr: float = 1e-3,
):
    """Return the config of a student and its teacher.

    Args:
        teacher: a backbone with its default weights, a run's folder or a checkpoint, or in Python a backbone's spec,
            such as dict(type="resnet50", pretrained="weights.pth").
        data: a folder, or what else `UnlabeledImages` takes; None: ImageNet.
    """
    crops = dict(type="ClassificationTrainTransforms", size=size, scale=[0.2, 1.0], color_jitter=0.4)
    whole = dict(type="ClassificationEvalTransforms", size=size)
    source = "{root}/train" if data is None else data
    cfg = dict(
        model=dict(type="FeatureDistillation", backbone=dict(type=backbone, pretrained=False), teacher=teacher),
        criterion=dict(type="FeatureDistillationLoss"),
        data=dict(
            root="data/imagenet", images_per_gpu=min(64, images_per_step), val_images_per_gpu=32, num_workers=8,
            train=dict(type="UnlabeledImages", source=source, transforms=crops),
            val=dict(type="ImageFolder", folder="{root}/val", transforms=whole),
        ),
        optimizer=dict(type="AdamW", lr=lr, weight_decay=0.05, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_epochs=epochs / 20),
        evaluator=dict(type="NearestNeighbors"),
        train=dict(
            epochs=epochs, images_per_step=images_per_step, reference_batch_size=images_per_step, precision="auto",
            clip_grad_norm=1.0, eval_every=5, best_metric="knn/top1",
        ),
    )  # fmt: skip
    if data is not None:
        cfg["data"]["val"] = dict(type="UnlabeledImages", source=source, transforms=whole)
        cfg["evaluator"] = dict(type="FeatureStatistics")
        cfg["train"]["best_metric"] = "loss"
    return cfg
