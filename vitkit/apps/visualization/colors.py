"""Colors of text that can be read on what lies behind it."""

from collections.abc import Sequence


def text_color(background: Sequence[float]) -> str:
    """Return "black" or "white", whichever has the higher contrast with a background by WCAG 2
    (https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio).

    Args:
        background: sRGB in 0..1; a fourth value, the opacity, is ignored.
    """
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in background[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "white"
