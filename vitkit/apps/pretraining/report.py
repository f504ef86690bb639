"""Write the report of a run without labels: its loss, the evaluation of its features, and nearest neighbors."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from vitkit.apps.report.images import ImageBudget
from vitkit.apps.report.report import IMAGE_BYTES, write_page
from vitkit.apps.report.sections import Gallery, Image, Section, Table
from vitkit.data.datasets.unlabeled_images import UnlabeledImages
from vitkit.evaluation.nearest_neighbors import nearest_neighbors
from vitkit.io.image_files import read_image
from vitkit.protocols.evaluator import is_measured

_NUM_QUERIES, _NUM_NEIGHBORS = 8, 3
_ABOUT = {
    "knn/top1": "k-NN top-1 accuracy",
    "knn/top5": "k-NN top-5 accuracy",
    "probe/top1": "linear probe's top-1 accuracy",
    "probe/top5": "linear probe's top-5 accuracy",
    "spread": "spread of the features (0: all images have the same)",
    "rank": "effective rank of the features",
}
_LABELED = (
    "Each image is classified by the others, from frozen features. Features of random weights are already better than "
    "chance: what was learned is the difference."
)
_UNLABELED = (
    "Without labels only a collapse can be told: features that hardly differ. Whether they are useful, the nearest "
    "neighbors below show, or --labeled FOLDER, a folder of images for each class."
)
_NEIGHBORS = (
    "A photo, and those whose features are the most similar to its own, with the cosine similarity. The features are "
    "those that differ from the mean of all."
)


def write_pretraining_report(
    path: Path,
    *,
    title: str,
    facts: Mapping[str, str],
    before: Mapping[str, float],
    after: Mapping[str, float],
    dataset: UnlabeledImages,
    features: torch.Tensor,
) -> Path:
    """Write the page.

    Args:
        before, after: metrics of the features.
        dataset: images to show.
        features: (N, D), those of the images.
    Returns:
        the file.
    """
    is_labeled = "knn/top1" in after
    rows = [
        [_ABOUT[name], before[name], after[name], f"{after[name] - before[name]:+.3f}"]
        for name in _ABOUT
        if all(is_measured(values.get(name, -1.0)) for values in (before, after))
    ]
    curves = path.parent / "curves.png"
    sections = [
        Section(
            "Features", [Table(("", "before", "after", "difference"), rows)], _LABELED if is_labeled else _UNLABELED
        ),
        Section("Nearest neighbors", [Gallery("", neighbor_groups(features), long_side=220)], _NEIGHBORS),
    ]
    if curves.is_file():
        loss = Image(None, "loss over the epochs", pixels=read_image(curves))
        sections.insert(0, Section("Training", [Gallery("", [[loss]], long_side=1400)]))
    return write_page(path, title, [(sections, ImageBudget(dataset, IMAGE_BYTES))], facts)


def neighbor_groups(features: torch.Tensor) -> list[Sequence[Image]]:
    """Return some images, spread over all, each with its nearest neighbors.

    Args:
        features: (N, D).
    """
    # With what all have in common, all similarities would be nearly 1.
    similarities, indices = nearest_neighbors(features - features.mean(dim=0), _NUM_NEIGHBORS)
    queries = np.unique(np.linspace(0, len(features) - 1, min(_NUM_QUERIES, len(features))).astype(int)).tolist()
    return [
        [
            Image(query, f"image {query}", caption=["photo"]),
            *(
                Image(index, f"similarity {similarity:.2f}", caption=[f"{similarity:.2f}"])
                for index, similarity in zip(indices[query].tolist(), similarities[query].tolist())
            ),
        ]
        for query in queries
    ]
