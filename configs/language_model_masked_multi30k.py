"""A small encoder-only language model on the German side of Multi30k, which fills in masked tokens.

Run:  python tools/train.py configs/language_model_masked_multi30k.py data.root=data/multi30k
Here: a trial of three epochs (train.epochs=3 schedule.warmup_epochs=1) reached perplexity 216 on the masked words.
"""

from vitkit.configs.parts.multi30k import multi30k_text


def config():
    return dict(
        model=dict(
            type="MaskedLanguageModel", num_layers=3, d_model=256, num_heads=4, d_ffn=512, dropout=0.1,
            norm_first=True, max_length=128,
        ),
        criterion=dict(type="SequenceLoss", label_smoothing=0.0),
        data=multi30k_text("masked"),
        optimizer=dict(type="AdamW", lr=1e-3, betas=(0.9, 0.98), weight_decay=1e-2, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_epochs=2),
        evaluator=dict(type="LanguageModelEvaluator"),
        train=dict(
            epochs=20, eval_every=2, precision="auto", clip_grad_norm=1.0, reference_batch_size=4096,
            best_metric="log_likelihood",
        ),
    )  # fmt: skip
