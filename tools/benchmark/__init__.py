"""Compare speed and memory with other implementations."""
