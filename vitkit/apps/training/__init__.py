"""Training, testing and comparing as functions."""
