"""What DETR's parts are worth, on the synthetic world (Carion et al. 2020, https://arxiv.org/abs/2005.12872).

Numbers of encoder and decoder layers and no feed-forward networks (table 2 and section 4.2), position encodings (table
3), leaving out each loss term (table 4), and 300 query slots. The base has two encoder and three decoder layers. The
AP after each decoder layer: see model_zoo/ablations/README.md.

Run:  vitkit ablate detr_parts
Here: see model_zoo/ablations/detr_parts.md.
"""

from vitkit.configs.parts.wide_detr import wide_detr_settings


def without(term):
    """Return the change that gives a term no weight, neither in the loss nor in the matching."""
    return {f"criterion.weights.{term}": 0.0, f"criterion.matcher.cost_{term}": 0.0}


def ablation():
    return dict(
        base="quickstart/detr",
        metrics=["bbox/AP50", "bbox/AP"],
        settings=wide_detr_settings() | {"train.epochs": 3},
        arms={
            "DETR": {},
            "no encoder": {"model.head.num_encoder_layers": 0},
            "1 encoder layer": {"model.head.num_encoder_layers": 1},
            "4 encoder layers": {"model.head.num_encoder_layers": 4},
            "1 decoder layer": {"model.head.num_decoder_layers": 1},
            "6 decoder layers": {"model.head.num_decoder_layers": 6},
            "no feed-forward networks": {"model.head.d_ffn": 0},
            "no positions": {"model.head.positions": "none"},
            "sines at the input": {"model.head.positions": "sine_input"},
            "learned positions": {"model.head.positions": "learned"},
            "no L1": without("l1"),
            "no GIoU": without("giou"),
            "300 slots": {"model.num_queries": 300},
        },
    )
