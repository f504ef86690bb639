"""Datasets, transforms, collation and loading.

`vitkit.protocols.dataset.Dataset` says what the other parts require of a dataset; datasets of images share
`BaseImageDataset`, those of text `TextDataset`. This package imports none of its parts, so that vitkit.io stays free
of the others.
"""

import os

# On import, albumentations checks the network for a newer version; loading data must not do that.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
