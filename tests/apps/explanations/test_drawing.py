import re

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from vitkit.apps.explanations.drawing import (
    QueryAttention,
    QueryLayer,
    coco_sizes,
    draw_decoder_attention,
    draw_encoder_attention,
    draw_query_slots,
    draw_sampling_points,
    overlay_attention,
    size_kinds,
)
from vitkit.apps.visualization.canvas import class_color

MAGENTA, GREEN, BLUE, RED, LIMEGREEN = (255, 0, 255), (44, 160, 44), (31, 119, 180), (214, 39, 40), (50, 205, 50)


@pytest.fixture
def panels(monkeypatch):
    """Return the panels of saved figures, so that tests can check numbers and not only pixels."""
    saved = []
    savefig = Figure.savefig

    def keep(figure, *args, **kwargs):
        saved.extend(panel for panel in figure.axes if panel.get_label() != "<colorbar>")
        savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def gray_image(height: int = 60, width: int = 90) -> np.ndarray:
    return np.full((height, width, 3), 100, np.uint8)


def count_color(path, color: tuple[int, int, int]) -> int:
    return int((np.asarray(Image.open(path).convert("RGB")) == color).all(axis=-1).sum())


def query_layer(reference: list[float], weights: torch.Tensor | None = None) -> QueryLayer:
    locations = torch.rand(2, 3, 4, 2)
    weights = torch.full((2, 3, 4), 1 / 12) if weights is None else weights
    box = torch.tensor([0.5, 0.5, 0.4, 0.2])
    return QueryLayer(locations, weights, torch.tensor(reference), box, "cat", 0.9, levels=[0, 1, 2])


def test_overlay_colors_only_attended_locations():
    weights = torch.zeros(2, 2)
    weights[0, 1] = 0.3
    drawn = overlay_attention(gray_image(), weights, color=(200, 0, 0))
    # 0.15 of the darkened gray, 75, and 0.85 of the color.
    assert drawn[0, -1].tolist() == [181, 11, 11]
    assert drawn[-1, 0].tolist() == [75, 75, 75]
    assert drawn.shape == (60, 90, 3)
    # A single location, as hard attention reads it, does not spread into its neighbors.
    assert (drawn[:30, 45:, 0] == 181).all() and (drawn[..., 0] == 181).sum() == 30 * 45


def test_overlay_leaves_negative_weights_gray():
    drawn = overlay_attention(gray_image(), torch.tensor([[-1.0, 0.5]]), color=(200, 0, 0))
    assert drawn[0, 0].tolist() == [75, 75, 75] and drawn[0, -1].tolist() == [181, 11, 11]


def test_overlay_of_a_map_with_padding_shows_only_the_image_part():
    weights = torch.tensor([[0.2, 0.2, 0.9, 0.9]])
    drawn = overlay_attention(gray_image(), weights, color=(200, 0, 0), covered=(1.0, 2.0))
    left = drawn[0, 0].tolist()
    assert drawn[0, 30].tolist() == left and drawn[0, -1, 0] > left[0]
    weights[0, 2:] = 0
    assert overlay_attention(gray_image(), weights, color=(200, 0, 0), covered=(1.0, 2.0))[0, 0].tolist() == [
        181,
        11,
        11,
    ]


def test_overlay_of_a_map_of_zeros_is_gray():
    assert (overlay_attention(gray_image(), torch.zeros(2, 3)) == 75).all()


def test_encoder_attention_has_a_panel_per_point_with_its_point_marked(tmp_path, panels):
    path = tmp_path / "new" / "encoder.png"
    draw_encoder_attention(gray_image(), [(45, 30), (9, 6)], torch.rand(2, 4, 6), path)
    # 90 pixels become 630.
    places = [panel.lines[0].get_xydata().tolist() for panel in panels]
    assert places == [[[315, 210]], [[315, 210]], [[63, 42]]]
    assert [panel.get_title() for panel in panels] == ["points", "point 1: x 45, y 30", "point 2: x 9, y 6"]
    assert Image.open(path).width > 1000


def test_decoder_attention_has_a_panel_per_box_with_its_query_class_and_score(tmp_path, panels):
    boxes_xyxy = torch.tensor([[10.0, 10, 40, 50], [50.0, 5, 80, 25]])
    path = tmp_path / "decoder.png"
    draw_decoder_attention(
        gray_image(),
        [
            QueryAttention(7, boxes_xyxy[0], "cat", 0.9, torch.rand(4, 6), 1.5),
            QueryAttention(3, boxes_xyxy[1], "dog", 0.75, torch.rand(4, 6), 0.5),
        ],
        path,
    )
    assert [panel.get_title() for panel in panels] == [
        "boxes",
        "query 7: cat 0.90\n1.5 x uniform attention",
        "query 3: dog 0.75\n0.5 x uniform attention",
    ]
    box = panels[2].patches[0]
    assert box.get_bbox().bounds == pytest.approx((350, 35, 210, 140))
    assert np.array(box.get_edgecolor())[:3] == pytest.approx(np.array(class_color(1)) / 255)
    assert count_color(path, class_color(0)) > 100 and count_color(path, class_color(1)) > 100


def test_sampling_has_a_row_per_layer_and_a_column_per_level_and_one_for_all(tmp_path, panels):
    layers = [query_layer([0.5, 0.5]), query_layer([0.5, 0.5, 0.2, 0.2])]
    path = tmp_path / "sampling.png"
    draw_sampling_points(gray_image(), layers, path, strides=[8, 16, 32])
    assert [panel.get_title() for panel in panels[:4]] == [
        "level 0 (stride 8)",
        "level 1 (stride 16)",
        "level 2 (stride 32)",
        "all levels",
    ]
    labels = [panel.get_ylabel().splitlines() for panel in panels[::4]]
    assert [label[:2] for label in labels] == [["layer 0", "cat 0.90"], ["layer 1", "cat 0.90"]]
    assert all(re.fullmatch(r"in the box: \d\.\d x uniform", label[2]) for label in labels)
    assert [len(panel.collections[0].get_offsets()) for panel in panels[:4]] == [8, 8, 8, 24]
    assert [len(panel.patches) for panel in panels[::4]] == [1, 2]  # the second layer's reference is a box too
    reference = panels[0].lines[0].get_xydata().tolist()
    assert reference == [[315, 210]]
    assert count_color(path, MAGENTA) > 100 and count_color(path, LIMEGREEN) > 100


def test_sampling_draws_all_groups_of_a_level_in_its_column(tmp_path, panels):
    layer = query_layer([0.5, 0.5])._replace(levels=[0, 1, 1])
    draw_sampling_points(gray_image(), [layer], tmp_path / "sampling.png", strides=[8, 16])
    assert [len(panel.collections[0].get_offsets()) for panel in panels[:3]] == [8, 16, 24]
    drawn = panels[1].collections[0].get_offsets() / [630, 420]
    np.testing.assert_allclose(drawn, layer.locations[:, 1:].flatten(0, 2), atol=1e-6)


def test_sampling_on_one_level_has_one_column(tmp_path, panels):
    layer = query_layer([0.5, 0.5])
    one = layer._replace(locations=layer.locations[:, :1], weights=layer.weights[:, :1], levels=[0])
    draw_sampling_points(gray_image(), [one, one], tmp_path / "sampling.png", strides=[8])
    assert [panel.get_title() for panel in panels[:2]] == ["level 0 (stride 8)", ""]


def test_sampling_points_are_drawn_at_their_locations_largest_weight_on_top(tmp_path, panels):
    weights = torch.zeros(1, 2, 1)
    weights[0, :, 0] = torch.tensor([0.7, 0.3])
    locations = torch.tensor([[0.1, 0.2], [0.9, 0.5]]).view(1, 2, 1, 2)
    box = torch.tensor([0.5, 0.5, 0.4, 0.2])
    layer = QueryLayer(locations, weights, torch.tensor([0.5, 0.5]), box, "cat", 0.9, levels=[0, 1])
    draw_sampling_points(gray_image(), [layer], tmp_path / "sampling.png", strides=[8, 16])
    everything = panels[2].collections[0]
    assert everything.get_offsets().tolist() == pytest.approx(np.array([[567, 210], [63, 84]]))
    assert everything.get_array().tolist() == pytest.approx([0.3, 0.7])
    assert everything.norm.vmax == pytest.approx(0.7)


def test_slots_have_a_panel_per_query_with_a_dot_per_image(tmp_path, panels):
    boxes_cxcywh = torch.tensor(
        [[[0.2, 0.3, 0.1, 0.1], [0.5, 0.5, 0.9, 0.3]], [[0.6, 0.7, 0.1, 0.2], [0.4, 0.4, 0.3, 0.9]]]
    )
    path = tmp_path / "slots.png"
    draw_query_slots(boxes_cxcywh, size_kinds(boxes_cxcywh, torch.ones(2, 1)), path, queries=[1, 0])
    assert [panel.get_title() for panel in panels] == ["query 1", "query 0"]
    assert panels[1].collections[0].get_offsets().tolist() == pytest.approx(np.array([[0.2, 0.3], [0.6, 0.7]]))
    assert all(count_color(path, color) > 20 for color in (GREEN, BLUE, RED))


def test_coco_sizes_are_areas_in_pixels():
    boxes_cxcywh = torch.tensor([[0.5, 0.5, 0.31, 0.1], [0.5, 0.5, 0.33, 0.1], [0.5, 0.5, 0.97, 0.3]])
    assert coco_sizes(boxes_cxcywh, torch.tensor(100.0 * 320)).tolist() == [0, 1, 2]


def test_size_kinds_follow_the_pixels_and_not_the_relative_sides():
    boxes_cxcywh = torch.tensor([[0.5, 0.5, 0.1, 0.3], [0.5, 0.5, 0.4, 0.5], [0.5, 0.5, 0.4, 0.5]])
    # 0.4 of a width of 2 is more than 0.5 of a height of 1.
    assert size_kinds(boxes_cxcywh, torch.tensor([1.0, 2.0, 1.0])).tolist() == [0, 1, 2]
