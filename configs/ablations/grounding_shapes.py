"""What lets a text-prompted detector find pairs of a color and a shape that training has never shown.

The base is quickstart/grounding, which never sees a quarter of the 48 pairs; bbox/AP_unseen is the mean AP of these.
Denoising queries start from the class's text ("TextDenoising"), from a learned vector for its place in the prompt as in
MM-Grounding-DINO ("by place"), or there are none.

Run:  vitkit ablate grounding_shapes
Here: see model_zoo/ablations/grounding_shapes.md.
"""


def ablation():
    by_place = dict(type="BoxDenoising", num_queries=20)
    return dict(
        base="quickstart/grounding",
        metrics=["bbox/AP_seen", "bbox/AP_unseen"],
        settings={"train.epochs": 2},
        arms={
            "Grounding DINO": {},
            "denoising by place": {"model.training_queries": [by_place]},
            "no denoising": {"model.training_queries": []},
        },
    )
