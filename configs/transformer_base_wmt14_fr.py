"""The base Transformer on WMT 2014 English to French (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/transformer_base_wmt14_fr.py
           vitkit average averages the last five checkpoints, as the paper does (section 6.1).
           vitkit test RUN --split test evaluates newstest2014, which sacrebleu downloads.
Reference: 38.1 tokenized BLEU on newstest2014 after 100 k steps (paper, table 2).
           sacrebleu, which this config reports, is on another scale. Here: not yet run.
"""

from vitkit.configs.parts.wmt14 import wmt14
from vitkit.configs.transformer_base_wmt14 import config as german


def config():
    cfg = german()
    cfg["data"] = wmt14(tokens_per_gpu=3200, root="data/wmt14_fr", target="fr", vocabulary_size=32000)
    # Two epochs of 36 M pairs are about 85 k steps of 25600 tokens, of which checkpoints every 1500 are averaged.
    cfg["train"] |= dict(epochs=2, save_every_steps=1500)
    return cfg
