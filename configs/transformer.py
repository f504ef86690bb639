"""The Transformer on WMT 2014, from English to German or French (Vaswani et al. 2017,
https://arxiv.org/abs/1706.03762).

Run:       torchrun --nproc-per-node 8 tools/train.py transformer_base_wmt14
           vitkit average averages the last five checkpoints, for big ones the last 20, as the paper does (section 6.1).
           vitkit test RUN --split test evaluates newstest2014, which sacrebleu downloads.
Reference: tokenized BLEU on newstest2014 (paper, table 2), after 100 k steps (big: 300 k); sacrebleu, which these
           configs report, is on another scale. 65 M and 213 M parameters (table 3). Here: not yet run.
"""

from typing import Literal

from vitkit.configs.parts.wmt14 import wmt14

VARIANTS = {
    "transformer_base_wmt14": (dict(), "27.3 BLEU"),
    "transformer_big_wmt14": (dict(size="big"), "28.4 BLEU"),
    "transformer_base_wmt14_fr": (dict(target="fr"), "38.1 BLEU"),
    "transformer_big_wmt14_fr": (dict(size="big", target="fr"), "41.8 BLEU, with dropout 0.1 (section 6.1)"),
}
"""Name -> arguments of `config`, and what is published."""


def config(size: Literal["base", "big"] = "base", target: Literal["de", "fr"] = "de"):
    cfg = dict(
        model=dict(
            type=f"transformer_{size}", decoding=dict(method="beam", beams=4, length_penalty=0.6, max_length=256)
        ),
        criterion=dict(type="SequenceLoss", label_smoothing=0.1),
        # About 25000 tokens of each language in a step of 8 GPUs (section 5.1).
        data=wmt14(tokens_per_gpu=3200),
        optimizer=dict(
            type="AdamW", lr=5e-4 if size == "big" else 7e-4, weight_decay=0.0, betas=(0.9, 0.98), eps=1e-9
        ),
        schedule=dict(type="InverseSqrtLR", warmup_steps=4000),
        evaluator=dict(type="TextEvaluator"),
        train=dict(
            epochs=57 if size == "big" else 19, reference_batch_size=25600,
            keep_checkpoints=20 if size == "big" else 5, best_metric="bleu",
        ),
    )  # fmt: skip
    if target == "fr":
        cfg["data"] = wmt14(tokens_per_gpu=3200, root="data/wmt14_fr", target="fr", vocabulary_size=32000)
        # Two epochs of 36 M pairs are about 85 k steps of 25600 tokens, of which checkpoints every 1500 are averaged;
        # seven are about 300 k steps.
        cfg["train"].update(epochs=7 if size == "big" else 2, save_every_steps=1500)
    if (size, target) == ("big", "fr"):
        cfg["model"]["dropout"] = 0.1
    return cfg
