"""Datasets on disk: written in the formats of other tools, repaired, merged, split, packed, drawn."""
