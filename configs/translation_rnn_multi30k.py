"""A recurrent encoder and decoder without attention on Multi30k (Cho et al. 2014, https://arxiv.org/abs/1406.1078).

Everything except the attention is as in translation_rnnsearch_multi30k.py, for comparison.

Run:       python tools/train.py configs/translation_rnn_multi30k.py data.root=data/multi30k
Reference: none for this size on validation data. 7.2 M parameters.
Here:      21.9 BLEU on val greedily, 24.6 with 4 beams (sacrebleu, cased, 13a); with attention 34.6 and
           36.5. Seed 42; 20 min of one core's processor time, 23 by the clock.
"""

from vitkit.configs.translation_rnnsearch_multi30k import config as rnnsearch


def config():
    cfg = rnnsearch()
    cfg["model"]["attention"] = None
    return cfg
