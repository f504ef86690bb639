"""Heads, which predict from features: a file per paper."""
