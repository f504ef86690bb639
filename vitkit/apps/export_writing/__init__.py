"""Models as files that run without PyTorch: ONNX and torch.export, written, checked, and run again."""
