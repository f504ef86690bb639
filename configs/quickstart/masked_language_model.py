"""Filling gaps in counting with a small encoder-only language model (Devlin et al. 2019, section 3.1,
https://arxiv.org/abs/1810.04805): "nine, <mask>, eleven". No download, minutes.

Run:  python tools/train.py configs/quickstart/masked_language_model.py
      vitkit generate runs/masked_language_model "four hundred nineteen, four hundred <mask>, four hundred twenty-one"
Here: perplexity 1.621 of the masked words of 1000 unseen lines for seed 42; 2.6 minutes of a core.
"""

from vitkit.configs.quickstart.causal_language_model import config as causal


def config():
    cfg = causal()
    cfg["model"] = dict(
        type="MaskedLanguageModel", num_layers=2, d_model=128, num_heads=4, d_ffn=256, dropout=0.0, norm_first=True,
        max_length=64,
    )  # fmt: skip
    for split in ("train", "val"):
        cfg["data"][split]["objective"] = "masked"
    cfg["train"]["epochs"] = 10
    return cfg
