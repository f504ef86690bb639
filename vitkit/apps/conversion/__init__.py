"""Checkpoints written in other formats, folders of the transformers library among them."""
