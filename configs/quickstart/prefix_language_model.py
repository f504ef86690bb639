"""Text to text with a prefix language model (Raffel et al. 2020, https://arxiv.org/abs/1910.10683): number words from
English to German and back, depending on the source's first words. No download, minutes.

Run:  python tools/train.py configs/quickstart/prefix_language_model.py
      vitkit translate runs/prefix_language_model "translate German to English: einundzwanzig"
Here: exact match 0.844 of 1000 unseen numbers, chrF 97.8, for seed 42; 2.6 minutes of one core of an AMD EPYC.
"""


def config():
    return dict(
        model=dict(
            type="PrefixLanguageModel", num_layers=3, d_model=128, num_heads=4, d_ffn=256, dropout=0.1,
            positions="sine", decoding=dict(method="greedy", max_length=64),
        ),
        criterion=dict(type="SequenceLoss", label_smoothing=0.1),
        data=dict(
            train=dict(type="NumberTasks", num_pairs=20000, vocabulary=dict(kind="bpe", size=160, shared=True)),
            val=dict(type="NumberTasks", num_pairs=1000, split="val"),
            tokens_per_gpu=2048, num_workers=0,
        ),
        optimizer=dict(type="AdamW", lr=2e-3, betas=(0.9, 0.98), weight_decay=1e-4, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_epochs=0.5),
        evaluator=dict(type="TextEvaluator", metrics=["chrf", "exact_match"]),  # single words have no BLEU
        train=dict(epochs=5, clip_grad_norm=1.0, reference_batch_size=2048, best_metric="exact_match"),
    )  # fmt: skip
