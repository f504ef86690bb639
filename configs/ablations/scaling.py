"""How the loss of a language model falls with the amount of data, at three widths, with the power law of each (Hestness
et al. 2017, https://arxiv.org/abs/1712.00409; Kaplan et al. 2020, https://arxiv.org/abs/2001.08361), and the best size
for an amount of compute (Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556).

The models count in words. Each line is seen once, so that no model overfits; twice the lines are twice the steps. As
the first number of a line is random, no model can have a loss below 0.50 nats per token.

Run:  vitkit ablate scaling
Here: see model_zoo/ablations/scaling.md.
"""

WIDTHS = (32, 64, 128)
LINES = (500, 1000, 2000, 4000, 8000)
TOKENS_PER_LINE = 18.3
"""Mean of the training lines."""


def parameters(width: int) -> int:
    """Return the parameters of the two layers and the last norm, without embeddings, as in Kaplan et al."""
    return 2 * (12 * width**2 + 13 * width) + 2 * width


def ablation():
    return dict(
        base="quickstart/causal_language_model",
        metrics=["nll", "token_accuracy"],
        settings={
            "data.tokens_per_gpu": 256, "train.reference_batch_size": 256, "train.epochs": 1,
            "schedule.warmup_epochs": 0.1, "optimizer.lr": 1e-3,
        },
        evaluations=1,
        arms={
            f"width {width}, {lines} lines": {
                "model.d_model": width, "model.d_ffn": 4 * width, "data.train.num_lines": lines,
            }
            for width in WIDTHS
            for lines in LINES
        },
        curves={f"width {width}": {lines: f"width {width}, {lines} lines" for lines in LINES} for width in WIDTHS},
        x_label="training lines",
        power_law=True,
        frontier={
            f"width {width}, {lines} lines": (parameters(width), lines * TOKENS_PER_LINE)
            for width in WIDTHS
            for lines in LINES
        },
        least_loss=0.50,
    )  # fmt: skip
