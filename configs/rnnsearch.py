"""RNNsearch on Multi30k, English to German (Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473), smaller than there;
without attention it is the recurrent encoder and decoder of Cho et al. 2014 (https://arxiv.org/abs/1406.1078).

Run:       python tools/train.py translation_rnnsearch_multi30k data.root=data/multi30k
           rnnsearch:attention=concat, dot, scaled_dot, general, cosine, plain_cosine or location: the other scores.
Reference: none for this size on validation data.
Here:      BLEU on val (sacrebleu, cased, 13a) after 14 epochs, seed 42, see `VARIANTS`.
"""

from vitkit.configs.parts.multi30k import multi30k

VARIANTS = {
    "translation_rnnsearch_multi30k": (
        dict(),
        "here: 34.6 BLEU greedily, 36.5 with 4 beams, bf16, 36 min of one core's processor time; 9.2 M parameters",
    ),
    "translation_rnn_multi30k": (
        dict(attention=None),
        "here: 21.9 BLEU greedily, 24.6 with 4 beams, 20 min of one core's processor time; 7.2 M parameters",
    ),
}
"""Name -> arguments of `config`, and what was measured."""


def config(attention: str | None = "additive"):
    return dict(
        model=dict(
            type="RNNTranslator", attention=attention, cell="gru", d_embedding=256, d_hidden=384, dropout=0.3,
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
