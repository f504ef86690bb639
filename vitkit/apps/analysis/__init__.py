"""Costs of a model: parameters, MACs and memory."""
