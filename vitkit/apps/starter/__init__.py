"""Train and evaluate a model on your own data: split it, choose settings by timing, train, report."""
