"""What lets a text-prompted detector find pairs of a color and a shape that training has never shown.

The base is quickstart/grounding, which never sees a quarter of the 48 pairs; bbox/AP_unseen is the mean AP of these.
Beside it a DINO of the same size, whose classes are all 48 pairs: those that it never sees keep a column of the class
head without an example. Denoising queries that start from the class's text ("TextDenoising"), from a learned vector for
its place in the prompt as in MM-Grounding-DINO ("by place"), or none; a text encoder of more layers, or of fewer
channels; a fusion that is always dropped in training, so that it stays as it starts, without effect; fewer pairs to
learn from.

Run:  vitkit ablate grounding_shapes
Here: see model_zoo/ablations/grounding_shapes.md; the arms of the text encoder, the fusion and the pairs are not yet
      run.
"""

from vitkit.configs.quickstart.dino import config as dino
from vitkit.configs.quickstart.grounding import COLORS, PAIRS, SEEN, SHAPES


def closed_set():
    """A DINO with a class for each pair, on the same images."""
    cfg = dino()
    absent = [pair for pair in PAIRS if pair not in SEEN]
    return {
        "model": cfg["model"] | dict(num_detections=100), "criterion": cfg["criterion"], "data.prompts": None,
        "data.train.pairs": PAIRS, "data.train.absent": absent,
    }  # fmt: skip


def every(step):
    """The pairs of training, of which each color keeps every `step`-th shape."""
    kept = [f"{c} {s}" for i, c in enumerate(COLORS) for j, s in enumerate(SHAPES) if (i + j) % step == 0]
    return {"data.train.pairs": [pair for pair in SEEN if pair in kept]}


def ablation():
    by_place = dict(type="BoxDenoising", num_queries=20)
    return dict(
        base="quickstart/grounding",
        metrics=["bbox/AP_seen", "bbox/AP_unseen"],
        settings={"train.epochs": 2},
        arms={
            "Grounding DINO": {},
            "closed-set DINO": closed_set(),
            "denoising by place": {"model.training_queries": [by_place]},
            "no denoising": {"model.training_queries": []},
            "text encoder of 3 layers": {"model.text_encoder.num_layers": 3},
            "text encoder of 16 channels": {"model.text_encoder.d_model": 16, "model.text_encoder.d_ffn": 32},
            "no fusion": {"model.head.fusion_drop_path": 1.0},
            "24 pairs": every(2),
            "12 pairs": every(3),
        },
    )
