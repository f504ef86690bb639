"""Draw boxes, masks, curves and attention."""
