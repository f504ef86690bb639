"""Grounding DINO (Liu et al. 2023, https://arxiv.org/abs/2303.05499) and MM-Grounding-DINO (Zhao et al. 2024,
https://arxiv.org/abs/2401.02361): detection of what a text names, fine-tuned on COCO 2017 with all its names as prompt.

The two are one network. MM's divides the logits by the square root of the channels and adds a bias, has a box head for
each layer, drops attention weights of the fusion instead of whole fusions, and weighs the phrases' tokens in the
matching by the whole prompt's focal loss. The recipe of the original is that of Open-GroundingDino, since its authors
published none: matching weights 1, 5, 2 and a loss weight of 2 for classes. Both train with denoising queries that start
from the text of their class, where MM has a learned vector for its place in the prompt, and the original none.

As in MM's fine-tuning, every prompt has all classes (negatives=None); data.prompts.negatives=85 samples them, as in its
training on many datasets, and is for data with more classes than a prompt holds. "frozen" trains neither backbone nor
text encoder, for few classes of one's own: data.train.images=DIR data.train.annotations=FILE, and so data.val;
data.prompts.phrases="{'WBC': 'white blood cell'}" tells what a name means.

LVIS is fine-tuned on with sampled prompts, as by MM; it is evaluated on minival by fixed AP, with its 1203 names in parts
of 40. MM shortens "bow_(weapon)" to "bow"; here names keep what tells them apart.

Run:       torchrun --nproc-per-node 16 tools/train.py mm_grounding_dino_swin_tiny --init mm_grounding_dino_swin_tiny_o365_goldg
           vitkit test grounding_dino_swin_tiny data.root=COCO    # zero-shot, with all names as prompt
Reference: the two original READMEs; "zero-shot" is COCO without training on it. Here: not yet run.
"""  # noqa: E501

from typing import Literal

from vitkit.configs.parts.coco import coco_detection
from vitkit.configs.parts.lvis import lvis_detection
from vitkit.configs.parts.swin import BACKBONES

VARIANTS = {
    "grounding_dino_swin_tiny": (dict(), "48.4 box AP zero-shot, 57.2 fine-tuned; 172.2 million parameters"),
    "grounding_dino_swin_base": (
        dict(backbone="swin_base"),
        "56.7 box AP, with COCO among its training data; 232.3 million parameters",
    ),
    "mm_grounding_dino_swin_tiny": (
        dict(style="mm"),
        "50.4 box AP zero-shot, 58.2 fine-tuned; 172.9 million parameters",
    ),
    "mm_grounding_dino_swin_tiny_lvis": (
        dict(style="mm", data="lvis"),
        "41.4 fixed AP zero-shot on minival, 58.7 fine-tuned, after training on O365, GoldG, GRIT, V3Det",
    ),
    "mm_grounding_dino_swin_base": (
        dict(style="mm", backbone="swin_base"),
        "52.5 box AP zero-shot; 233.0 million parameters",
    ),
    "mm_grounding_dino_swin_large": (
        dict(style="mm", backbone="swin_large"),
        "53.0 box AP zero-shot; 343.1 million parameters",
    ),
    "mm_grounding_dino_swin_tiny_frozen": (
        dict(style="mm", frozen=True),
        "88.1 box AP zero-shot on 144 photos of cats, the original's example of few classes of one's own",
    ),
}
"""Name -> arguments of `config`, and what is published."""


def config(
    backbone: Literal["swin_tiny", "swin_base", "swin_large"] = "swin_tiny",
    style: Literal["original", "mm"] = "original",
    frozen: bool = False,
    data: Literal["coco", "lvis"] = "coco",
):
    is_mm, is_large = style == "mm", backbone == "swin_large"
    maps = ["res2", "res3", "res4", "res5"][0 if is_large else 1 :]
    costs = dict(cost_labels=2.0, label_cost="prompt") if is_mm else dict(cost_labels=1.0, label_cost="phrase")
    lr = 2e-4 if is_mm and not frozen else 1e-4
    epochs, drops = (20, [15]) if frozen else (12, [8, 11]) if is_mm else (15, [4, 8, 12])
    rates = {"text_encoder.": 0.1} if is_mm else {"ref_point_head": 0.1, "sampling_offsets": 0.1}
    cfg = dict(
        model=dict(
            type="GroundingDINO", num_queries=900, num_detections=300, tokenizer="bert-base-uncased",
            backbone=dict(**BACKBONES[backbone], drop_path=0.2),
            neck=dict(type="PyramidProjection", in_features=maps, out_channels=256, num_levels=len(maps) + 1),
            text_encoder=dict(type="BertEncoder", frozen=frozen or not is_mm),
            head=dict(
                type="GroundingDINOHead", d_model=256, num_heads=8, num_points=4, d_ffn=2048, dropout=0.0,
                num_encoder_layers=6, num_decoder_layers=6, scale=is_mm, bias=is_mm, share_heads=not is_mm,
                fusion_drop_path=0.0 if is_mm else 0.1, fusion_dropout=0.1 if is_mm else 0.0,
                box_eps=1e-5 if is_mm else 1e-3,
            ),
            training_queries=[
                dict(type="TextDenoising", num_queries=100, contrastive=True, label_noise=0.5, box_noise=1.0),
            ],
        ),
        criterion=dict(
            type="GroundingCriterion",
            weights=dict(labels=1.0 if is_mm else 2.0, l1=5.0, giou=2.0),
            matcher=dict(type="TokenMatcher", **costs, cost_l1=5.0, cost_giou=2.0),
        ),
        data=dict(coco_detection(images_per_gpu=4), prompts=dict(negatives=None)),
        optimizer=dict(
            type="AdamW", lr=lr, backbone_lr=0.0 if frozen else 0.1 * lr, weight_decay=1e-4,
            lr_multipliers={} if frozen else rates,
        ),
        schedule=dict(type="MultiStepLR", drop_at_epochs=drops),
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"]),
        train=dict(
            epochs=epochs, clip_grad_norm=0.1, seed=42, reference_batch_size=32 if frozen or not is_mm else 64,
            activation_checkpointing=is_large,
        ),
    )  # fmt: skip
    if data == "lvis":
        cfg["model"]["chunk_size"] = 40
        val = "lvis_v1_minival_inserted_image_name"
        cfg["data"] = dict(lvis_detection(images_per_gpu=4, val=val), prompts=dict(negatives=85))
        cfg["optimizer"]["lr_multipliers"] = {}
        cfg["schedule"]["drop_at_epochs"] = [11]
        cfg["evaluator"] = dict(type="LvisEvaluator", iou_types=["bbox"], fixed_ap=True)
        cfg["train"]["eval_every"] = 3
    return cfg
