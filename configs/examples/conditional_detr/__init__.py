"""Conditional DETR (Meng et al. 2021, https://arxiv.org/abs/2108.06152)."""
