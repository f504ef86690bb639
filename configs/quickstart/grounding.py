"""A small Grounding DINO on the synthetic world: it finds colors and shapes whose combination it has never seen.

Run:  python tools/train.py configs/quickstart/grounding.py
"""

from vitkit.configs.quickstart.deformable_detr import config as deformable_detr

COLORS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink")
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
PAIRS = [f"{color} {shape}" for color in COLORS for shape in SHAPES]
UNSEEN = [f"{color} {shape}" for i, color in enumerate(COLORS) for j, shape in enumerate(SHAPES) if (i - j) % 4 == 1]
"""A quarter of the pairs, "red star" first; training has each of their colors and each of their shapes in others."""
SEEN = [pair for pair in PAIRS if pair not in UNSEEN]


def config():
    cfg = deformable_detr()
    data = cfg["data"]
    cfg["model"] = dict(
        type="GroundingDINO", num_queries=10, num_detections=100,
        backbone=cfg["model"]["backbone"] | dict(base_channels=32, out_features=["res3"]),
        neck=dict(type="PyramidProjection", num_levels=1, out_channels=96),
        text_encoder=dict(
            type="TransformerTextEncoder", num_layers=1, d_model=96, num_heads=4, d_ffn=192, dropout=0.0
        ),
        head=dict(
            type="GroundingDINOHead", d_model=96, num_heads=8, d_ffn=384, num_encoder_layers=1, num_decoder_layers=2,
            scale=True, bias=True, fusion_drop_path=0.0,
        ),
        training_queries=[dict(type="TextDenoising", num_queries=20)],
    )  # fmt: skip
    costs = dict(cost_labels=2.0, cost_l1=5.0, cost_giou=2.0)
    cfg["criterion"] = dict(
        type="GroundingCriterion",
        weights=dict(labels=4.0, l1=5.0, giou=2.0),
        matcher=dict(type="TokenMatcher", label_cost="phrase", **costs),
    )
    data["train"]["pairs"], data["val"]["pairs"] = SEEN, PAIRS
    data["prompts"] = dict(negatives=11, phrases={pair: f"{'an' if pair[0] == 'o' else 'a'} {pair}" for pair in PAIRS})
    cfg["evaluator"]["groups"] = dict(seen=SEEN, unseen=UNSEEN)
    cfg["optimizer"].update(lr=2e-3)
    cfg["train"]["epochs"] = 4
    return cfg
