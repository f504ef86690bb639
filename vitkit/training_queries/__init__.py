"""Queries that a model has only in training, in addition to those that it predicts with.

A config lists them: `training_queries=[dict(type="BoxDenoising", num_queries=100),
dict(type="QueryGroups", groups=3)]` in its model section. Inference does not import this package.

Each kind is a module registered in TRAINING_QUERIES and built with `head` and `num_classes`. It has
    key: the name of its parameters in a model's state dict, `training_queries.KEY`,
    num_selected: the number of boxes that it takes from a head that selects boxes from the image,
    proposals: the layers that select these boxes, see `TrainingQueries.proposals`; empty if those of the head do,
    forward(head, targets, selected): makes its sets for a batch, a list of `QuerySet` with `queries`, from the boxes
        that the head has selected, (B, num_selected, 4), if it selects any.
"""
