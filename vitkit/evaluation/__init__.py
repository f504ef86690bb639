"""Metrics: `update(predictions, targets)` per batch, `gather()` over ranks, `compute() -> dict[str, float]`.

They also write predictions, `write_results(path)`, and most can evaluate such a file, `load_results(path)`.
"""
