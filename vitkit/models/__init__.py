"""Whole models: backbone, neck and head."""
