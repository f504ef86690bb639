"""Datasets, transforms, collation and loading.

vitkit.protocols says what the other parts require of a dataset; datasets of images share `BaseImageDataset`, those of
text `TextDataset`.
"""

import os

# On import, albumentations checks the network for a newer version; loading data must not do that.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

# Importing a module registers its classes.
from vitkit.data.datasets import captions, cityscapes, coco, image_folder, panoptic, semantic, video  # noqa: F401
from vitkit.data.loading import loader  # noqa: F401
from vitkit.data.synthetic import motion, number_words, shapes  # noqa: F401
from vitkit.data.text import monolingual, pairs  # noqa: F401
from vitkit.data.transforms import classification, clips, mixing, pipelines, several_images  # noqa: F401
