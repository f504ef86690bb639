"""The big Transformer on WMT 2014 English to French (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/transformer_big_wmt14_fr.py
           vitkit average averages the last 20 checkpoints, as the paper does (section 6.1).
           vitkit test RUN --split test evaluates newstest2014, which sacrebleu downloads.
Reference: 41.8 tokenized BLEU on newstest2014 after 300 k steps (paper, table 2), with dropout 0.1 (section 6.1).
           sacrebleu, which this config reports, is on another scale. Here: not yet run.
"""

from vitkit.configs.transformer_base_wmt14_fr import config as base


def config():
    cfg = base()
    cfg["model"] |= dict(type="transformer_big", dropout=0.1)
    cfg["optimizer"]["lr"] = 5e-4
    # About 300 k steps.
    cfg["train"] |= dict(epochs=7, keep_checkpoints=20)
    return cfg
