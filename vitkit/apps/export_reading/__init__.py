"""Exported files, read and run: ONNX and torch.export."""
