"""Heads, which predict from features; one file per paper."""
