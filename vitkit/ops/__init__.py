"""Plain functions on boxes, masks, attention weights, and image, video and annotation files."""
