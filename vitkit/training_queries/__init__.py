"""Queries that a model has only in training, in addition to those that it predicts with.

A config lists them: `training_queries=[dict(type="BoxDenoising", num_queries=100),
dict(type="QueryGroups", groups=3)]` in its model section.
Inference does not import this package.
"""

from vitkit.training_queries.box_denoising import BoxDenoising
from vitkit.training_queries.groups import OneToManyQueries, QueryGroups
from vitkit.training_queries.mask_denoising import MaskDenoising
from vitkit.training_queries.sets import QuerySet, TrainingQueries

__all__ = ["BoxDenoising", "MaskDenoising", "OneToManyQueries", "QueryGroups", "QuerySet", "TrainingQueries"]
