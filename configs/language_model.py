"""Small language models on the German side of Multi30k: a decoder that continues text, and an encoder that fills in
masked tokens.

Run:  python tools/train.py language_model_causal_multi30k data.root=data/multi30k
Here: trials of three epochs (train.epochs=3 schedule.warmup_epochs=1), see `VARIANTS`.
"""

from typing import Literal

from vitkit.configs.parts.multi30k import multi30k_text

VARIANTS = {
    "language_model_causal_multi30k": (dict(objective="causal"), "here: perplexity 58.3 after the second epoch"),
    "language_model_masked_multi30k": (dict(objective="masked"), "here: perplexity 216, of words masked by batch"),
}
"""Name -> arguments of `config`, and what was measured."""


def config(objective: Literal["causal", "masked"] = "causal"):
    sizes = dict(num_layers=3, d_model=256, num_heads=4, d_ffn=512, max_length=128)
    decoding = dict(method="sample", top_p=0.9, max_length=100)
    causal = dict(type="CausalLanguageModel", dropout=0.3, decoding=decoding, **sizes)
    masked = dict(type="MaskedLanguageModel", dropout=0.1, norm_first=True, **sizes)
    return dict(
        model=causal if objective == "causal" else masked,
        criterion=dict(type="SequenceLoss", label_smoothing=0.0),
        data=multi30k_text(objective),
        optimizer=dict(
            type="AdamW", lr=2e-3 if objective == "causal" else 1e-3, betas=(0.9, 0.98), weight_decay=1e-2,
            no_weight_decay=["vectors"],
        ),
        schedule=dict(type="CosineLR", warmup_epochs=2),
        evaluator=dict(type="LanguageModelEvaluator"),
        train=dict(
            epochs=20, eval_every=2, precision="auto", clip_grad_norm=1.0, reference_batch_size=4096,
            best_metric="log_likelihood",
        ),
    )  # fmt: skip
