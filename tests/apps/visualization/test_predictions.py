"""Figures below their classes and captions."""

import numpy as np
import torch
from helpers.plain_dataset import PlainDataset
from PIL import Image

from vitkit.apps.visualization.predictions import draw_predictions


def images(classes=()):
    """A dataset of five gray images."""
    return PlainDataset(
        has_images=True,
        image_ids=[7, 8, 9, 10, 11],
        classes=list(classes),
        load_image=lambda index: np.full((20, 30, 3), 40 * index, np.uint8),
    )


def test_every_image_is_shown_with_its_classes(tmp_path):
    samples = [({"class_scores": torch.tensor([0.3, 0.7])}, {"label": i % 2, "image_id": 7 + i}) for i in range(5)]
    assert draw_predictions(samples, images(["cat", "dog"]), tmp_path / "new" / "figure.png")
    pixels = np.asarray(Image.open(tmp_path / "new" / "figure.png").convert("RGB")).reshape(-1, 3)
    colors = {tuple(pixel) for pixel in np.unique(pixels, axis=0).tolist()}
    assert {(40 * i,) * 3 for i in range(5)} <= colors
    assert {(0, 128, 0), (178, 34, 34)} <= colors  # right and wrong titles


def test_every_image_is_shown_with_its_caption(tmp_path):
    samples = [({"text": "dogs\n" * 12 if i else ""}, {"references": ["A cat ."], "image_id": 7 + i}) for i in range(5)]
    assert draw_predictions(samples, images(), tmp_path / "figures/captions.png")
    with Image.open(tmp_path / "figures/captions.png") as figure:
        assert figure.format == "PNG" and figure.width > 1000


def test_four_frames_of_a_video_are_shown(tmp_path):
    videos = images(["left", "right"])
    videos.is_video = True
    videos.load_frames = lambda index, count: [np.full((20, 30, 3), 50 * i, np.uint8) for i in range(1, 1 + count)]
    samples = [({"class_scores": torch.tensor([0.3, 0.7])}, {"label": 1, "image_id": 7})]
    assert draw_predictions(samples, videos, tmp_path / "figure.png")
    pixels = np.asarray(Image.open(tmp_path / "figure.png").convert("RGB")).reshape(-1, 3)
    colors, counts = np.unique(pixels, axis=0, return_counts=True)
    areas = {tuple(color): count for color, count in zip(colors.tolist(), counts.tolist())}
    assert all(areas[(50 * i,) * 3] > 5000 for i in range(1, 5))


def test_unsupported_predictions_draw_no_figure(tmp_path):
    assert not draw_predictions([], images(), tmp_path / "none.png")
    assert not draw_predictions([({"tokens": [1]}, {"image_id": 7})], images(), tmp_path / "none.png")
    assert not list(tmp_path.iterdir())
