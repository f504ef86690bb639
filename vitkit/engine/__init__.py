"""Training and evaluation: from a config to a trained model and its metrics. Start reading at trainer.py."""
