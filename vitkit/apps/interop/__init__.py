"""Configs of the transformers library, translated both ways.

A model of the transformers library is known by its key names, a table in `vitkit.model_zoo.converters`, and by its
settings, a `Kind` in the file here for detectors, masks, backbones or text.
"""
