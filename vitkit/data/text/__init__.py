"""Text datasets: parallel sentences, and lines for language models."""
