"""RT-DETR, D-FINE and DINO on blood cells, from random weights, after the same number of photos.

How fast small detectors learn from 205 photos: all arms see each of them five times, in float32 or bfloat16, whichever
the processor is made for, and cost about the same. The networks are RT-DETR (https://arxiv.org/abs/2304.08069) with the
backbone of D-FINE-N and with a ResNet-18, D-FINE (https://arxiv.org/abs/2410.13842), and DINO of detection_bccd.py
(https://arxiv.org/abs/2203.03605) without the coarsest stage; all have 128 channels, three decoder layers, 80 queries
and MAL (DEIM, https://arxiv.org/abs/2412.04234).

Run:  vitkit ablate realtime_bccd data.root=DIR --seeds 42
Here: see model_zoo/ablations/realtime_bccd.md.
"""

from vitkit.configs.ablations.detection_bccd import DINO

HGNET = dict(type="TimmBackbone", name="hgnetv2_b0", out_features=["res3", "res4", "res5"])
RESNET = dict(type="ResNet", depth=18, norm="bn", out_features=["res3", "res4", "res5"], pretrained=False)
DENOISING = dict(type="BoxDenoising", num_queries=40)
RT_DETR_DENOISING = DENOISING | dict(eps=1e-5, padding=0.0)
LOSSES = dict(labels=1.0, l1=5.0, giou=2.0)
CROP = "data.train.transforms.transforms.2"


def rt_detr(backbone, images_per_gpu=4):
    return {
        "model": dict(
            type="RTDETR", num_queries=80, num_detections=100, backbone=backbone,
            neck=dict(type="HybridEncoder", out_channels=128, d_ffn=512, num_blocks=1, expansion=0.5),
            head=dict(type="RTDETRHead", d_model=128, num_heads=4, d_ffn=512, num_decoder_layers=3),
            training_queries=[RT_DETR_DENOISING],
        ),
        "data.images_per_gpu": images_per_gpu, "train.reference_batch_size": images_per_gpu,
    }  # fmt: skip


def d_fine():
    arm = rt_detr(HGNET)
    arm["model"].update(
        type="DFINE",
        neck=dict(
            type="DFINEEncoder", out_channels=128, num_heads=8, d_ffn=512, dropout=0.0, num_blocks=1, expansion=0.34,
        ),
        head=dict(
            type="DFINEHead", d_model=128, d_ffn=512, num_heads=4, num_points=[4, 4, 4], dropout=0.0, activation="silu",
            num_decoder_layers=3, reg_max=32, reg_scale=4.0, up=0.5,
        ),
        training_queries=[RT_DETR_DENOISING | dict(mirror=True)],
    )  # fmt: skip
    matcher = dict(type="HungarianMatcher", activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0)
    weights = LOSSES | dict(fgl=0.15, ddf=1.5)
    return arm | {"criterion": dict(type="DFINECriterion", class_loss="mal", weights=weights, matcher=matcher)}


def ablation():
    return dict(
        base="bccd/deformable_detr",
        metrics=["bbox/AP", "bbox/AP50"],
        evaluations=1,
        settings={
            f"{CROP}.scales": [160, 176, 192], f"{CROP}.crop_scales": [224, 256], f"{CROP}.crop_range": [160, 208],
            "data.val.transforms.short_side": 176, "data.num_workers": 0,
            "criterion.class_loss": "mal", "criterion.weights": LOSSES,
            "optimizer": dict(type="AdamW", lr=1e-3, weight_decay=1e-4), "schedule.warmup_steps": 100,
            "train.precision": "auto", "train.best_metric": "bbox/AP", "train.epochs": 5, "train.log_every": 25,
        },
        arms={
            "D-FINE, HGNetv2-B0": d_fine(),
            "RT-DETR, HGNetv2-B0": rt_detr(HGNET),
            "RT-DETR, HGNetv2-B0, batches of 2": rt_detr(HGNET, 2),
            "RT-DETR, ResNet-18": rt_detr(RESNET),
            "DINO, ResNet-18": DINO | {"model.num_queries": 80, "model.training_queries": [DENOISING]},
        },
    )  # fmt: skip
