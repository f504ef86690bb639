"""RNNsearch on Multi30k, English to German (Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473), smaller than there.

Run:       python tools/train.py configs/translation_rnnsearch_multi30k.py data.root=data/multi30k
           model.attention=concat, dot, scaled_dot, general, cosine, plain_cosine or location: the other scores.
Reference: none for this size on validation data. 9.2 M parameters.
Here:      val BLEU 34.6 greedy, 36.5 with 4 beams; seed 42, 14 epochs, bf16, 36 min of one core's processor time.
"""

from vitkit.configs.parts.multi30k import multi30k


def config():
    return dict(
        model=dict(
            type="RNNTranslator", attention="additive", cell="gru", d_embedding=256, d_hidden=384, dropout=0.3,
            decoding=dict(method="greedy", max_length=100),
        ),
        criterion=dict(type="SequenceLoss", label_smoothing=0.1),
        data=multi30k(tokens_per_gpu=2048, vocabulary_size=6000),
        optimizer=dict(type="AdamW", lr=1e-3, weight_decay=1e-4, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_epochs=1),
        evaluator=dict(type="TextEvaluator"),
        train=dict(
            epochs=14, eval_every=2, precision="auto", clip_grad_norm=1.0, reference_batch_size=2048, log_every=40,
            best_metric="bleu",
        ),
    )  # fmt: skip
