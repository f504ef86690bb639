"""Sequence-to-sequence models, which write text, and the decoding methods that they share."""
