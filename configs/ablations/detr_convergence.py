"""Why Deformable DETR exists: DETR beside it on the synthetic world, over epochs at equal data.

Deformable DETR is the plain one (Zhu et al. 2021, https://arxiv.org/abs/2010.04159, table 1 and figure 3), with
neither box refinement nor two stages, with as many queries and layers as DETR, on one map and on several. Each uses its
paper's losses.

Run:  vitkit ablate detr_convergence
Here: see model_zoo/ablations/detr_convergence.md.
"""

from vitkit.configs.parts.wide_detr import wide_detr_settings

PLAIN = {
    "base": "quickstart/deformable_detr",
    "model.num_queries": 10,
    "model.head.num_encoder_layers": 2,
    "model.head.num_decoder_layers": 3,
    "model.head.refine_boxes": False,
    "model.head.two_stage": False,
}


def ablation():
    return dict(
        base="quickstart/detr",
        metrics=["bbox/AP50", "bbox/AP"],
        evaluations=5,
        settings=wide_detr_settings() | {"train.epochs": 5},
        arms={
            "DETR": {},
            "Deformable DETR, one map": PLAIN | {"model.backbone.out_features": ["res3"], "model.neck.num_levels": 1},
            "Deformable DETR, four maps": PLAIN,
            "Deformable DETR, refined, two stages": {"base": "quickstart/deformable_detr"},
        },
    )
