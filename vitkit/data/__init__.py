"""Datasets, transforms, collation and loading.

What the parts ask of a dataset is said in vitkit.protocols; datasets of images share `BaseImageDataset`, those of text
`TextDataset`.
"""

import os

# On import albumentations looks for a newer version on the network; loading data must not.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

# Importing a module registers its classes.
from vitkit.data.datasets import captions, cityscapes, coco, image_folder, panoptic, semantic, video  # noqa: F401
from vitkit.data.loading import loader  # noqa: F401
from vitkit.data.synthetic import motion, number_words, shapes  # noqa: F401
from vitkit.data.text import monolingual, pairs  # noqa: F401
from vitkit.data.transforms import classification, clips, mixing, pipelines, several_images  # noqa: F401
