"""Masks and classes in place of a class for each pixel, and how they are matched (Cheng et al. 2021,
https://arxiv.org/abs/2107.06278, section 4.3), on the synthetic world.

Per-pixel classification and MaskFormer share the backbone and the pixel decoder. "Fixed" assigns a query to each class
instead of using the best assignment.

Run:  vitkit ablate maskformer_matching
Here: see model_zoo/ablations/maskformer_matching.md.
"""

from vitkit.configs.quickstart.maskformer_semantic import config as maskformer

NUM_CLASSES = 10  # six shapes and four grounds


def ablation():
    model = maskformer()["model"]
    return dict(
        base="quickstart/maskformer_semantic",
        metrics=["mIoU", "pixel_accuracy"],
        settings={"train.epochs": 2},
        arms={
            "per-pixel": {
                "model": dict(
                    type="PerPixelClassification", backbone=model["backbone"], neck=model["neck"],
                    head=dict(type="PerPixelBaselineHead"),
                ),
                "criterion": dict(type="PerPixelCriterion"),
            },
            "MaskFormer, fixed": {"model.num_queries": NUM_CLASSES, "criterion.matcher": dict(type="FixedMaskMatcher")},
            "MaskFormer, bipartite": {"model.num_queries": NUM_CLASSES},
            "MaskFormer, bipartite, 12 queries": {},
        },
    )  # fmt: skip
