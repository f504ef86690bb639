"""Necks, between backbone and head: projections and pyramids."""
