"""A small decoder-only language model on the German side of Multi30k.

Run:  python tools/train.py configs/language_model_causal_multi30k.py data.root=data/multi30k
Here: a trial of three epochs (train.epochs=3 schedule.warmup_epochs=1) had perplexity 58.3 after the second.
"""

from vitkit.configs.parts.multi30k import multi30k_text


def config():
    return dict(
        model=dict(
            type="CausalLanguageModel", num_layers=3, d_model=256, num_heads=4, d_ffn=512, dropout=0.3,
            max_length=128, decoding=dict(method="sample", top_p=0.9, max_length=100),
        ),
        criterion=dict(type="SequenceLoss", label_smoothing=0.0),
        data=multi30k_text("causal"),
        optimizer=dict(type="AdamW", lr=2e-3, betas=(0.9, 0.98), weight_decay=1e-2, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_epochs=2),
        evaluator=dict(type="LanguageModelEvaluator"),
        train=dict(
            epochs=20, eval_every=2, precision="auto", clip_grad_norm=1.0, reference_batch_size=4096,
            best_metric="log_likelihood",
        ),
    )  # fmt: skip
