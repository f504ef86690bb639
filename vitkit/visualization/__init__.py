"""Pictures: boxes, curves."""
