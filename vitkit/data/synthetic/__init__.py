"""Data generated from an index alone: shapes with captions, and numbers in words."""
