"""Data generated only from an index: shapes with captions, and numbers in words."""
