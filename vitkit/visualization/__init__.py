"""Pictures: boxes, masks, curves, attention."""
