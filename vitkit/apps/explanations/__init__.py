"""Figures and pages of what models attend to, with a file for each kind of model."""
