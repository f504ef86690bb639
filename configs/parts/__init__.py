"""Sections that several configs share."""
