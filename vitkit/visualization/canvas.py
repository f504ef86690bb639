"""What all drawings on images share: colours of classes, name tags, sheets of pictures side by side."""

import colorsys
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

_GAP = 12  # pixels between the panels of a sheet


def class_color(label: int) -> tuple[int, int, int]:
    """RGB of a class: neighbours in the class list get hues far apart, and every round of hues another brightness."""
    hue = (0.02 + label * 0.381966) % 1.0
    value = (1.0, 0.75, 0.9)[label // 8 % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def to_picture(image: np.ndarray | Tensor) -> Image.Image:
    """
    Args:
        image: (H, W, 3) uint8 RGB array, or (3, H, W) uint8 tensor.
    Raises:
        ValueError: it is neither.
    """
    if isinstance(image, Tensor):
        image = image.detach().cpu().permute(1, 2, 0).numpy()
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(
            f"image: got {image.dtype} of shape {tuple(image.shape)}, expected uint8 of shape (H, W, 3), "
            f"or (3, H, W) for a tensor."
        )
    return Image.fromarray(np.ascontiguousarray(image))


def enlargement(size: Sequence[int], min_side: int) -> int:
    """The factor by which a picture is enlarged, so that its shorter side reaches `min_side`.

    Whole factors keep the pixels of a small image square.
    """
    return max(1, math.ceil(min_side / min(size)))


def font_for(picture: Image.Image) -> ImageFont.FreeTypeFont:
    """For names on a picture of its size."""
    return ImageFont.load_default(max(13, round(min(picture.size) / 28)))


def draw_tag(
    draw: ImageDraw.ImageDraw, place: Sequence[float], text: str, font: ImageFont.FreeTypeFont, color: Sequence[int]
) -> None:
    """A name at `place` (xyxy) on its colour."""
    bright = 0.3 * color[0] + 0.59 * color[1] + 0.11 * color[2] > 140
    draw.rectangle(tuple(place), fill=tuple(color))
    draw.text((place[0] + 3, place[1] + 1), text, fill="black" if bright else "white", font=font, anchor="la")


def tag_size(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont) -> tuple[float, float]:
    """(width, height) of a name tag."""
    _, _, width, _ = draw.textbbox((0, 0), text, font=font)
    _, _, _, height = draw.textbbox((0, 0), "Ag", font=font)  # one height for all names
    return width + 6, height + 4


def overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def save_pairs(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    titles: tuple[str, str],
    path: str | Path,
    *,
    pairs_per_line: int = 2,
) -> None:
    """Saves a PNG with pairs of pictures.

    Args:
        pairs: pictures (H, W, 3) uint8 RGB of any sizes.
        titles: above the left pictures and the right ones.
        path: of the PNG; its folder is made.
        pairs_per_line: of the sheet.
    """
    across = min(pairs_per_line, len(pairs))
    panel = min(480, max(max(left.shape[:2]) for left, _ in pairs))
    heading = round(panel / 12)
    lines = [pairs[i : i + across] for i in range(0, len(pairs), across)]
    # Panels are as wide as `panel` at most and keep their image's shape, so a line is as high as its highest.
    pictures = [[_fit(pair, panel) for pair in line] for line in lines]
    heights = [max(side.height for pair in line for side in pair) for line in pictures]
    width = across * (2 * panel + _GAP) + (across - 1) * 3 * _GAP + 2 * _GAP
    sheet = Image.new("RGB", (width, heading + sum(heights) + len(lines) * 2 * _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(round(panel / 20))
    columns = [_GAP + k * (2 * panel + 4 * _GAP) for k in range(across)]
    for left in columns:
        for k, title in enumerate(titles):
            draw.text((left + k * (panel + _GAP), heading / 2), title, fill="black", font=font, anchor="lm")
    top = heading
    for line, height in zip(pictures, heights):
        for left, pair in zip(columns, line):
            for k, side in enumerate(pair):
                sheet.paste(side, (left + k * (panel + _GAP), top))
        top += height + 2 * _GAP
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, format="PNG")


def save_grid(
    pictures: Sequence[np.ndarray], titles: Sequence[str], path: str | Path, *, per_line: int = 4, panel: int = 420
) -> None:
    """Saves a PNG with pictures in lines, each under its title.

    Args:
        pictures: (H, W, 3) uint8 RGB of any sizes, at least one.
        titles: one for each; what is too long is cut.
        path: of the PNG; its folder is made.
        per_line: pictures on one line.
        panel: most pixels of a picture's longer side.
    """
    font = ImageFont.load_default(max(11, round(panel / 26)))
    heading = round(panel / 16)
    across = min(per_line, len(pictures))
    fitted = [_fit([picture], panel)[0] for picture in pictures]
    lines = [range(i, min(i + across, len(pictures))) for i in range(0, len(pictures), across)]
    heights = [heading + max(fitted[k].height for k in line) + _GAP for line in lines]
    sheet = Image.new("RGB", (across * (panel + _GAP) + _GAP, sum(heights) + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    top = _GAP // 2
    for line, height in zip(lines, heights):
        for column, k in enumerate(line):
            left = _GAP + column * (panel + _GAP)
            text = _shorten(titles[k], font, panel)
            draw.text((left, top + heading / 2), text, fill="black", font=font, anchor="lm")
            sheet.paste(fitted[k], (left, top + heading))
        top += height
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, format="PNG")


def _shorten(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"


def _fit(pictures: Sequence[np.ndarray], panel: int) -> list[Image.Image]:
    """The pictures, made smaller by one factor so that none is larger than `panel` pixels."""
    factor = min(1.0, panel / max(max(side.shape[:2]) for side in pictures))
    sizes = [(max(1, round(side.shape[1] * factor)), max(1, round(side.shape[0] * factor))) for side in pictures]
    return [Image.fromarray(side).resize(size, Image.Resampling.LANCZOS) for side, size in zip(pictures, sizes)]
