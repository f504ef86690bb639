"""The interfaces of all parts, a file for each kind of part.

    backbone.py   `Backbone` and `Neck`, and `with_defaults`, which adds what a user's own leave out
    model.py      `Model` and `Head`
    fusing.py     how `Model.fuse` replaces parts, and what a part needs for it
    criterion.py  `Criterion`
    dataset.py    `Dataset` and `Loader`
    evaluator.py  `Evaluator`
    learning.py   models that learn from another network

`Model`, `Criterion`, `Dataset` and `Evaluator` are base classes: a registered class derives from its base, which has
the defaults of all that it may leave out. The other contracts are structural: a class in a user's own file needs no
base class of vitkit. `isinstance` checks for the runtime-checkable ones, which only some parts follow; it does not see
submodules, which `nn.Module` keeps in tables of its own; see `vitkit.protocols.model.child`.
"""
