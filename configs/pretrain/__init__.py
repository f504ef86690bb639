"""Backbones that learn from images without labels."""
