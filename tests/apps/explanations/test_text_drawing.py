import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from vitkit.apps.explanations import text_drawing
from vitkit.apps.explanations.text_drawing import animate_decoding, draw_arcs, draw_beams, draw_heads

TITLE = "What each written token attends to in the source, layer 0"
PAIR = np.array([[[0.9, 0.1], [0.5, 0.5]]])  # one head
NODES = [(1, "a", None, -0.1, True), (2, "</s>", 0, -0.2, True)]


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """The figures that are drawn, in place of their files."""
    drawn = []
    monkeypatch.setattr(text_drawing, "save_figure", lambda figure, path, *, dpi: drawn.append(figure))
    return drawn


@pytest.mark.parametrize("kind", ["heads", "arcs", "beams"])
def test_the_title_of_a_small_figure_is_not_cut(kind, figures):
    if kind == "heads":
        draw_heads([PAIR], "ab", "cd", "a.png", title=TITLE)
    elif kind == "arcs":
        draw_arcs(PAIR, "ab", "cd", "a.png", title=TITLE)
    else:
        draw_beams(NODES, "a.png", title="4 beams, with their summed log probability; green: the best hypothesis")
    (figure,) = figures
    figure.draw_without_rendering()
    title = figure._suptitle.get_window_extent()
    assert title.x0 >= 0 and title.x1 <= figure.bbox.x1 and title.y1 <= figure.bbox.y1
    assert all(title.y0 > axis.get_window_extent().y1 for axis in figure.axes)


def test_rows_with_one_visible_token_do_not_set_the_scale(figures):
    causal = np.array([[[1, 0, 0], [0.6, 0.4, 0], [0.3, 0.3, 0.4]]])
    draw_heads([causal, causal], "abc", "abc", "a.png")
    draw_heads([PAIR], "ab", "cd", "a.png")
    draw_heads([np.ones((1, 1, 1))], "a", "a", "a.png")
    assert [figure.axes[0].images[0].get_clim() for figure in figures] == [(0, 0.6), (0, 0.9), (0, 1)]
    bars = [figure.axes[-1]._colorbar for figure in figures]
    assert [bar.extend for bar in bars] == ["max", "neither", "neither"]


def test_arcs_below_a_fifth_of_the_largest_weight_of_their_row_have_no_line(figures):
    diffuse = np.full(50, 0.02)
    sharp = np.array([0.9, 0.05, 0.05, *[0] * 47])
    draw_arcs(np.stack([diffuse, sharp])[None], "ab", ["c"] * 50, "a.png")
    (lines,) = figures[0].axes[0].collections
    starts = [segment[0][1] for segment in lines.get_segments()]
    assert (starts.count(0), starts.count(1)) == (50, 1)
    assert figures[0].get_suptitle() == "No line: below 20% of the row's largest weight"


def test_each_written_token_is_a_frame_of_the_animation(tmp_path):
    steps = [("<s>", ["x", "y"], [0.9, 0.1]), ("x", ["</s>", "y"], [0.6, 0.4])]
    path = tmp_path / "new" / "decoding.gif"
    animate_decoding(["a", "b", "</s>"], ["x", "</s>"], torch.rand(2, 3), steps, path, milliseconds=500)
    with Image.open(path) as image:
        assert image.format == "GIF" and image.n_frames == 2
        frames, durations = [], []
        for number in range(2):
            image.seek(number)
            frames.append(np.asarray(image.convert("RGB")).astype(int))
            durations.append(image.info["duration"])
    assert durations == [500, 1500]
    assert all(frame.std() > 10 for frame in frames) and abs(frames[0] - frames[1]).max() > 50


def test_heads_of_long_texts_are_drawn_in_several_lines(figures):
    words = [f"word {k}" for k in range(40)]
    layers = np.random.default_rng(0).dirichlet(np.ones(40), (2, 8, 3))  # two layers of eight heads, three rows
    draw_heads(layers, "abc", words, "a.png")
    draw_heads(layers[..., :5], "abc", words[:5], "a.png")
    wide, narrow = figures
    assert wide.get_figwidth() <= 16 and narrow.get_figwidth() < 16
    shape = [figure.axes[0].get_gridspec().get_geometry() for figure in figures]
    assert shape == [(8, 2), (2, 8)]
    titles = [axis.get_title() for axis in wide.axes[:16]]
    assert titles == [f"head {k}" for k in (*range(8), *range(8))]
    drawn = np.stack([axis.images[0].get_array() for axis in wide.axes[:16]])
    assert np.array_equal(drawn, layers.reshape(16, 3, 40))


def test_the_best_beam_is_a_line_above_the_others():
    nodes = [
        (1, "a", None, -2.0, False),
        (1, "b", None, -1.0, True),
        (2, "c", 0, -3.0, False),
        (2, "d", 1, -1.5, True),
        (2, "e", 1, -4.0, False),
        (3, "f", 2, -5.0, False),
        (3, "</s>", 3, -1.6, True),
        (4, "</s>", 5, -6.0, False),
    ]
    corners = text_drawing.beam_corners(nodes)
    assert corners == [(1, -1), (1, 0), (2, -2), (2, 0), (2, -1), (3, -1), (3, 0), (4, -1)]
