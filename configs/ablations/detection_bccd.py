"""From DETR to DINO on blood cells, from ImageNet weights, at equal processor time.

Below "two stages", each arm adds one part to the previous one, as in table 4 of DINO (Zhang et al. 2022,
https://arxiv.org/abs/2203.03605): denoising, then mixed query selection and look forward twice, which make it DINO.
Groups of queries (Group DETR, https://arxiv.org/abs/2207.13085) and MAL instead of the focal loss (DEIM,
https://arxiv.org/abs/2412.04234) are each added to DINO separately. DN-DETR (https://arxiv.org/abs/2203.01305) is DETR
with denoising. The runs compare what is learned in the first minutes: images are smaller than in
configs/transfer/bccd.py, and the backbone is frozen up to res3, which halves the cost of a step.

Run:  vitkit ablate detection_bccd data.root=DIR    (other weights than torchvision's: see configs/parts/resnet.py)
Here: see model_zoo/ablations/detection_bccd.md; those runs of DINO had no norm of decoder outputs, and Deformable
      DETR's positions.
"""

from vitkit.configs.bccd.detr import config as bccd_detr

DENOISING = dict(type="BoxDenoising", num_queries=60)
GROUPS = dict(type="QueryGroups", groups=3)
DINO = {
    "model.type": "DINO",
    "model.num_detections": 100,
    "model.head": dict(
        type="DINOHead", d_model=128, num_heads=8, d_ffn=512, num_encoder_layers=1, num_decoder_layers=3,
        share_heads=False,
    ),
    "model.training_queries": [DENOISING],
}  # fmt: skip


def detr():
    model = bccd_detr()["model"]
    return {
        "model.type": "DETR",
        "model.backbone.out_features": ["res4"],
        "model.neck": model["neck"],
        "model.head": model["head"],
        "criterion": bccd_detr()["criterion"],
        "optimizer.lr_multipliers": {},
    }


def ablation():
    crop = "data.train.transforms.transforms.2"
    one_stage = {"model.head.two_stage": False, "model.head.refine_boxes": False}
    return dict(
        base="transfer/bccd",
        metrics=["bbox/AP", "bbox/AP50"],
        minutes=3.0,
        evaluations=3,
        settings={
            f"{crop}.scales": [160, 176, 192], f"{crop}.crop_scales": [224, 256], f"{crop}.crop_range": [160, 208],
            "data.val.transforms.short_side": 176, "data.num_workers": 0, "data.images_per_gpu": 2,
            "model.backbone.norm": "frozen_bn", "model.backbone.frozen_stages": 3,
            "optimizer.lr": 2e-4, "schedule.warmup_steps": 100,
            "train.precision": "auto", "train.reference_batch_size": 2,
        },
        arms={
            "DETR": detr(),
            "DN-DETR": detr() | {"model.training_queries": [DENOISING | dict(contrastive=False)]},
            "Deformable DETR": one_stage,
            "two stages": {},
            "+ denoising": {"model.training_queries": [DENOISING]},
            "DINO": DINO,
            "DINO + groups": DINO | {"model.training_queries": [DENOISING, GROUPS]},
            "DINO + MAL": DINO | {"criterion.class_loss": "mal"},
        },
    )  # fmt: skip
