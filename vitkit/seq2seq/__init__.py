"""Sequence to sequence: models that write text, the decoding methods that they share, and vocabularies."""
