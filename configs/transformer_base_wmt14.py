"""The base Transformer on WMT 2014 English to German (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/transformer_base_wmt14.py
           vitkit average averages the last five checkpoints, as the paper does (section 6.1).
           vitkit test RUN --split test evaluates newstest2014, which sacrebleu downloads.
Reference: 27.3 tokenized BLEU on newstest2014 after 100 k steps (paper, table 2); 65 M parameters (table 3).
           sacrebleu, which this config reports, is on another scale. Here: not yet run.
"""

from vitkit.configs.parts.wmt14 import wmt14


def config():
    return dict(
        model=dict(type="transformer_base", decoding=dict(method="beam", beams=4, length_penalty=0.6, max_length=256)),
        criterion=dict(type="SequenceLoss", label_smoothing=0.1),
        # About 25000 tokens of each language in a step of 8 GPUs (section 5.1).
        data=wmt14(tokens_per_gpu=3200),
        optimizer=dict(type="AdamW", lr=7e-4, weight_decay=0.0, betas=(0.9, 0.98), eps=1e-9),
        schedule=dict(type="InverseSqrtLR", warmup_steps=4000),
        evaluator=dict(type="TextEvaluator"),
        train=dict(epochs=19, reference_batch_size=25600, keep_checkpoints=5, best_metric="bleu"),
    )
