"""Data generated only from an index: shapes with captions, and numbers in words."""

# Importing a module registers its classes.
from vitkit.data.synthetic import motion, number_words, shapes  # noqa: F401
