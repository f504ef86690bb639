"""Text datasets: parallel sentences, and lines for language models."""

# Importing a module registers its classes.
from vitkit.data.text import monolingual, pairs  # noqa: F401
