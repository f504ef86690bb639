"""Layers and building blocks of models."""
