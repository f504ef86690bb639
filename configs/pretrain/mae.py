"""MAE (He et al. 2021, https://arxiv.org/abs/2111.06377): a ViT learns by reconstructing three quarters of each image.

Images are only cropped and flipped, and their classes are not read. On ImageNet those of the validation images serve to
tell, by the nearest neighbors, what the features are worth. On any images, such as a folder's:
vitkit train pretrain/mae:data=FOLDER,images_per_step=256,epochs=400 (config's arguments; the rate follows).

Run:       torchrun --nproc-per-node 8 tools/train.py mae_vit_b16_in1k
           On any number of GPUs a step has 4096 images, by accumulation. A detector takes the result as
           model.backbone.pretrained=runs/mae_vit_b16_in1k; a classifier: see mae_finetune.py.
Reference: top-1 after fine-tuning, and of a linear classifier on frozen features, after 1600 epochs (original README
           and paper). Fine-tuned ViT-B: 83.1, 83.3, 83.3 after 300, 400, 800 epochs (mmselfsup). The weights are
           CC BY-NC 4.0: https://dl.fbaipublicfiles.com/mae/pretrain/mae_pretrain_vit_base.pth (or large, huge).
Here:      not yet run on ImageNet; on small images: configs/quickstart/mae.py.
"""

VARIANTS = {
    "mae_vit_b16_in1k": (dict(backbone="vit_base_patch16"), "83.6 top-1 fine-tuned, 68.0 linear"),
    "mae_vit_l16_in1k": (dict(backbone="vit_large_patch16"), "85.9 top-1 fine-tuned, 75.8 linear"),
    "mae_vit_h14_in1k": (dict(backbone="vit_huge_patch14"), "86.9 top-1 fine-tuned, 76.6 linear"),
}
"""Name -> arguments of `config`, and what is published."""


def config(
    backbone: str = "vit_base_patch16",
    data: str | None = None,
    image_size: int = 224,
    epochs: int = 1600,
    images_per_step: int = 4096,
):
    """Return the config of a ViT; `data` is a folder, or what else `UnlabeledImages` takes; None: ImageNet.

    Those of DINOv3 keep their rotary positions, without which other models of that name could not take the weights.
    """
    crops = dict(type="ClassificationTrainTransforms", size=image_size, scale=[0.2, 1.0], interpolation="bicubic")
    whole = dict(type="ClassificationEvalTransforms", size=image_size, interpolation="bicubic")
    source = "{root}/train" if data is None else data
    positions = {} if "dinov3" in backbone else dict(positions="sincos")
    cfg = dict(
        model=dict(type="MAE", backbone=dict(type=backbone, image_size=image_size, **positions)),
        criterion=dict(type="ReconstructionLoss"),
        data=dict(
            root="data/imagenet", images_per_gpu=64, val_images_per_gpu=125, num_workers=8,
            train=dict(type="UnlabeledImages", source=source, transforms=crops),
            val=dict(type="ImageFolder", folder="{root}/val", transforms=whole),
        ),
        optimizer=dict(
            type="AdamW", lr=1.5e-4 * images_per_step / 256, betas=[0.9, 0.95], weight_decay=0.05,
            no_weight_decay=["vectors"],
        ),
        schedule=dict(type="CosineLR", warmup_epochs=min(40, epochs / 5)),
        evaluator=dict(type="NearestNeighbors"),
        train=dict(
            epochs=epochs, images_per_step=images_per_step, reference_batch_size=images_per_step, precision="auto",
            eval_every=20, best_metric="knn/top1",
        ),
    )  # fmt: skip
    if data is not None:
        cfg["data"]["val"] = dict(type="UnlabeledImages", source=source, transforms=whole)
        cfg["evaluator"] = dict(type="FeatureStatistics")
        cfg["train"]["best_metric"] = "loss"
    return cfg
