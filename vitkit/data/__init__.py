"""Datasets, transforms, collation and loading."""
