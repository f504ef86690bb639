"""Plain functions on boxes, masks, attention weights, and image, video, text and annotation files."""
