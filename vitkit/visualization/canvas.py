"""What all drawings on images share: colours of classes, name tags, figures of pictures side by side."""

import colorsys
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

Labels = Sequence[int] | np.ndarray | Tensor
Scores = Sequence[float] | np.ndarray | Tensor
_GAP = 12  # pixels between the panels of a figure


def class_color(label: int) -> tuple[int, int, int]:
    """Return the RGB of a class: adjacent labels get hues far apart, and every round of hues another brightness."""
    hue = (0.02 + label * 0.381966) % 1.0
    value = (1.0, 0.75, 0.9)[label // 8 % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def to_picture(image: np.ndarray | Tensor) -> Image.Image:
    """Convert an image for drawing.

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


def enlarge(image: np.ndarray | Tensor, min_side: int = 320) -> tuple[Image.Image, int]:
    """Convert an image for drawing, upscaled for its shorter side to reach `min_side`; return it and the factor.

    Integers keep the pixels of a small image square.
    """
    picture = to_picture(image)
    factor = max(1, math.ceil(min_side / min(picture.size)))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST), factor


def labels_and_texts(labels: Labels, class_names: Sequence[str], scores: Scores | None) -> tuple[list[int], list[str]]:
    """Return the labels of objects, and their names, each with its score behind it."""
    labels = torch.as_tensor(labels).tolist()
    texts = [class_names[label] for label in labels]
    if scores is not None:
        texts = [f"{text} {score:.2f}" for text, score in zip(texts, torch.as_tensor(scores).tolist())]
    return labels, texts


def font_for(picture: Image.Image) -> ImageFont.FreeTypeFont:
    """Return the font for names on a picture of its size."""
    return ImageFont.load_default(max(13, round(min(picture.size) / 28)))


def draw_tag(
    draw: ImageDraw.ImageDraw, box: Sequence[float], text: str, font: ImageFont.FreeTypeFont, color: Sequence[int]
) -> None:
    """Draw a name in `box` (xyxy) on its colour."""
    bright = 0.3 * color[0] + 0.59 * color[1] + 0.11 * color[2] > 140
    draw.rectangle(tuple(box), fill=tuple(color))
    draw.text((box[0] + 3, box[1] + 1), text, fill="black" if bright else "white", font=font, anchor="la")


def tag_size(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont) -> tuple[float, float]:
    """Return (width, height) of a name tag."""
    _, _, width, _ = draw.textbbox((0, 0), text, font=font)
    _, _, _, height = draw.textbbox((0, 0), "Ag", font=font)  # one height for all names
    return width + 6, height + 4


def overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    """Return whether two xyxy boxes overlap."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def save_grid(
    pictures: Sequence[np.ndarray], titles: Sequence[str], path: str | Path, *, per_line: int = 4, panel: int = 420
) -> None:
    """Save a PNG with pictures in lines, each under its title.

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
    canvas = Image.new("RGB", (across * (panel + _GAP) + _GAP, sum(heights) + _GAP), "white")
    draw = ImageDraw.Draw(canvas)
    top = _GAP // 2
    for line, height in zip(lines, heights):
        for column, k in enumerate(line):
            left = _GAP + column * (panel + _GAP)
            text = _shorten(titles[k], font, panel)
            draw.text((left, top + heading / 2), text, fill="black", font=font, anchor="lm")
            canvas.paste(fitted[k], (left, top + heading))
        top += height
    canvas.save(make_folder(path), format="PNG")


def _shorten(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Cut a text that is wider than `width` pixels, and end it with an ellipsis."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"


def _fit(pictures: Sequence[np.ndarray], panel: int) -> list[Image.Image]:
    """Downscale the pictures by one factor so that none is larger than `panel` pixels."""
    factor = min(1.0, panel / max(max(side.shape[:2]) for side in pictures))
    sizes = [(max(1, round(side.shape[1] * factor)), max(1, round(side.shape[0] * factor))) for side in pictures]
    return [Image.fromarray(side).resize(size, Image.Resampling.LANCZOS) for side, size in zip(pictures, sizes)]


def save_figure(figure: Figure, path: str | Path, *, dpi: int) -> None:
    """Save a PNG of a figure; its folder is made."""
    figure.savefig(make_folder(path), dpi=dpi, format="png")


def make_folder(path: str | Path) -> Path:
    """Make the folder of a file; return the file's path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
