"""vitkit: dense prediction with transformers in plain PyTorch."""
