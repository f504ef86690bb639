"""Text on a color is black or white, whichever can be read."""

import pytest
from matplotlib import colormaps

from vitkit.apps.visualization.colors import text_color


@pytest.mark.parametrize(
    ("background", "expected"),
    [
        ((0, 0, 0), "white"),
        ((1, 1, 1), "black"),
        ((1, 1, 0), "black"),
        ((0, 0, 1), "white"),
        ((0.27, 0.0, 0.33, 1.0), "white"),  # the dark purple of viridis
        ((0.99, 0.91, 0.14, 1.0), "black"),  # its yellow
    ],
)
def test_text_is_black_on_bright_and_white_on_dark_colors(background, expected):
    assert text_color(background) == expected


@pytest.mark.parametrize("name", ["viridis", "magma", "Blues", "inferno", "turbo"])
def test_text_has_the_contrast_of_wcag_on_every_color_of_a_map(name):
    for k in range(256):
        color = colormaps[name](k)
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in color[:3]]
        luminance = sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear))
        lighter, darker = (1.0, luminance) if text_color(color) == "white" else (luminance, 0.0)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5
