"""Datasets of text: parallel sentences, and lines for language models."""
