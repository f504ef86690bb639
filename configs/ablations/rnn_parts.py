"""Recurrent translation of number words: without attention, with each alignment score, and with scheduled sampling.

The fixed context against attention (Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473, table 1), the scores of
Luong et al. 2015 (https://arxiv.org/abs/1508.04025, table 4: location, dot, general; their concat is in section 3.1),
scaled (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762) and cosine scores (Graves et al. 2014,
https://arxiv.org/abs/1410.5401), and scheduled sampling (Bengio et al. 2015, https://arxiv.org/abs/1506.03099). For
results on real sentences by length, see model_zoo/translation_by_length.png.

Run:  vitkit ablate rnn_parts
Here: see model_zoo/ablations/rnn_parts.md.
"""

RNN = dict(
    type="RNNTranslator",
    attention="additive",
    d_embedding=64,
    d_hidden=128,
    decoding=dict(method="greedy", max_length=64),
)


def ablation():
    return dict(
        base="quickstart/translation",
        metrics=["exact_match", "chrf"],
        settings={"model": RNN, "train.epochs": 4},
        arms={
            "additive": {},
            "no attention": {"model.attention": None},
            "location": {"model.attention": "location"},
            "dot": {"model.attention": "dot"},
            "scaled_dot": {"model.attention": "scaled_dot"},
            "general": {"model.attention": "general"},
            "concat": {"model.attention": "concat"},
            "cosine": {"model.attention": "cosine"},
            "plain_cosine": {"model.attention": "plain_cosine"},
            "additive, scheduled sampling": {"train.hooks": [dict(type="ScheduledSampling", end=0.25)]},
        },
    )
