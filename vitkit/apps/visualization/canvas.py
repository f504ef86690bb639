"""Shared parts of all drawings on images: colors of classes, name tags, figures of images side by side."""

import colorsys
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitkit.apps.visualization.colors import text_color
from vitkit.io.channel_files import as_rgb
from vitkit.io.folders import declare_output
from vitkit.io.output import write_bytes, writing

Labels = Sequence[int] | np.ndarray | Tensor
Scores = Sequence[float] | np.ndarray | Tensor
_GAP = 12  # pixels between the panels of a figure
_MAX_TEXT, _MAX_TITLE = 100, 1000  # letters of a name on an image, and of a title above it


def class_color(label: int) -> tuple[int, int, int]:
    """Return the RGB of a class: adjacent labels get distant hues, and the brightness changes every 8 labels."""
    hue = (0.02 + label * 0.381966) % 1.0
    value = (1.0, 0.75, 0.9)[label // 8 % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, value)
    return round(red * 255), round(green * 255), round(blue * 255)


_KNOWN_COLORS = {
    (95, 165, 235): ("sky",),
    (120, 115, 130): ("road", "street", "highway", "runway"),
    (45, 140, 60): ("tree", "trees", "vegetation", "plant", "plants", "forest", "bush"),
    (130, 200, 70): ("grass", "field", "lawn", "terrain", "meadow"),
    (40, 80, 200): ("water", "sea", "river", "lake"),
    (190, 110, 75): ("building", "house", "skyscraper"),
    (225, 165, 185): ("pavement", "sidewalk", "path"),
    (235, 60, 70): ("person", "pedestrian", "people"),
    (250, 150, 40): ("bicyclist", "rider", "cyclist"),
    (60, 60, 220): ("car", "truck", "bus", "vehicle"),
    (240, 215, 60): ("sign", "signsymbol", "traffic sign"),
    (225, 200, 150): ("sand", "beach"),
    (0, 160, 165): ("fence",),
    (235, 240, 250): ("snow",),
    (150, 110, 60): ("earth", "soil", "dirt", "mountain"),
}
"""RGB -> names of the classes that people expect in this color."""
_COLOR_OF_NAME = {name: color for color, names in _KNOWN_COLORS.items() for name in names}


def choose_class_color(label: int, class_names: Sequence[str]) -> tuple[int, int, int]:
    """Return the RGB of a class: blue for sky, green for plants, ..., if its name is known, or else `class_color`.

    If several classes have the same expected color, such as tree and bush, only the first gets it.
    """
    colors = [_COLOR_OF_NAME.get(_plain_name(name)) for name in class_names]
    color = colors[label] if label < len(colors) else None
    return color if color is not None and colors.index(color) == label else class_color(label)


def _plain_name(name: str) -> str:
    """Normalize a class name: "sky-other-merged" and "Sky" become "sky"."""
    return re.sub(r"[-_](other|merged|stuff).*$", "", name.casefold()).strip()


def to_pil(image: np.ndarray | Tensor) -> Image.Image:
    """Convert an image for drawing.

    Args:
        image: (H, W, 3) uint8 RGB array, or (3, H, W) uint8 tensor; or uint16 of any number of channels, see `as_rgb`.
    Raises:
        ValueError: the image is none of these.
    """
    if isinstance(image, Tensor):
        image = image.detach().cpu().permute(1, 2, 0).numpy()
    if image.dtype == np.uint16 and image.ndim == 3:
        image = as_rgb(image)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(
            f"image: got {image.dtype} of shape {tuple(image.shape)}, expected uint8 of shape (H, W, 3), "
            f"or (3, H, W) for a tensor."
        )
    return Image.fromarray(np.ascontiguousarray(image))


MAX_ENLARGED = 4096
"""Pixels; an image of 1 x 20000 pixels would otherwise be drawn on gigabytes."""


def enlarge(image: np.ndarray | Tensor, min_side: int = 320) -> tuple[Image.Image, int]:
    """Convert an image for drawing, upscaled until its shorter side reaches `min_side`; return it and the factor.

    Integer factors keep the pixels of a small image square. The longer side is not upscaled beyond `MAX_ENLARGED`.
    """
    drawing = to_pil(image)
    factor = max(1, min(math.ceil(min_side / min(drawing.size)), MAX_ENLARGED // max(drawing.size)))
    return drawing.resize((drawing.width * factor, drawing.height * factor), Image.Resampling.NEAREST), factor


def labels_and_texts(labels: Labels, class_names: Sequence[str], scores: Scores | None) -> tuple[list[int], list[str]]:
    """Return the labels of objects, and their names followed by their scores, if there are any."""
    labels = torch.as_tensor(labels).tolist()
    texts = [class_names[label] for label in labels]
    texts = [text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…" for text in texts]
    if scores is not None:
        texts = [f"{text} {score:.2f}" for text, score in zip(texts, torch.as_tensor(scores).tolist())]
    return labels, texts


def font_for(image: Image.Image) -> ImageFont.FreeTypeFont:
    """Return a font for names whose size suits the image."""
    return ImageFont.load_default(max(13, round(min(image.size) / 28)))


def draw_tag(
    draw: ImageDraw.ImageDraw, box: Sequence[float], text: str, font: ImageFont.FreeTypeFont, color: Sequence[int]
) -> None:
    """Draw a name in `box` (xyxy) on a background of its color."""
    draw.rectangle(tuple(box), fill=tuple(color))
    fill = text_color([value / 255 for value in color])
    draw.text((box[0] + 3, box[1] + 1), text, fill=fill, font=font, anchor="la")


def tag_size(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont) -> tuple[float, float]:
    """Return (width, height) of a name tag."""
    _, _, width, _ = draw.textbbox((0, 0), text, font=font)
    _, _, _, height = draw.textbbox((0, 0), "Ag", font=font)  # one height for all names
    return width + 6, height + 4


def overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    """Whether two xyxy boxes overlap."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def save_grid(
    images: Sequence[np.ndarray],
    titles: Sequence[str],
    path: str | Path,
    *,
    colors: Sequence[str] = (),
    per_line: int = 4,
    panel: int = 420,
) -> None:
    """Save a PNG with rows of images, each below its title.

    Args:
        images: (H, W, 3) uint8 RGB of any sizes, at least one.
        titles: one for each image; long titles are wrapped.
        path: the PNG's path; its folder is made.
        colors: the color of each title; none: black.
        per_line: images per row.
        panel: the maximum length of an image's longer side in pixels.
    """
    colors = colors or ["black"] * len(titles)
    font = ImageFont.load_default(max(11, round(panel / 26)))
    line_height = round(panel / 16)
    broken = [break_lines(title[:_MAX_TITLE], font, panel) for title in titles]
    across = min(per_line, len(images))
    fitted = [Image.fromarray(scale_image(image, panel)[0]) for image in images]
    lines = [range(i, min(i + across, len(images))) for i in range(0, len(images), across)]
    headings = [line_height * max(len(broken[k]) for k in line) for line in lines]
    heights = [heading + max(fitted[k].height for k in line) + _GAP for line, heading in zip(lines, headings)]
    canvas = Image.new("RGB", (across * (panel + _GAP) + _GAP, sum(heights) + _GAP), "white")
    draw = ImageDraw.Draw(canvas)
    top = _GAP // 2
    for line, height, heading in zip(lines, heights, headings):
        for column, k in enumerate(line):
            left = _GAP + column * (panel + _GAP)
            for number, text in enumerate(broken[k]):
                at = left, top + (number + 0.5) * line_height
                draw.text(at, text, fill=colors[k], font=font, anchor="lm")
            canvas.paste(fitted[k], (left, top + heading))
        top += height
    encoded = io.BytesIO()
    canvas.save(encoded, format="PNG")
    write_bytes(Path(path), encoded.getvalue())
    declare_output(Path(path))


def break_lines(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Break a text into lines of at most `width` pixels, between words where possible."""
    lines = [""]
    for part in re.findall(r"\S+\s*|\s+", text.replace("\n", " ")):
        if lines[-1] and font.getlength(lines[-1] + part.rstrip()) > width:
            lines.append("")
        for letter in part:
            if lines[-1] and font.getlength(lines[-1] + letter) > width and letter != " ":
                lines.append("")
            lines[-1] += letter
    return [line.strip() for line in lines]


def scale_image(image: np.ndarray, side: int = 640) -> tuple[np.ndarray, float]:
    """Scale an image to a long side of at most `side`, enlarging by integers only; return the image and the factor."""
    scale = side / max(image.shape[:2])
    scale = math.floor(scale) if scale >= 1 else scale
    height, width = (max(1, round(length * scale)) for length in image.shape[:2])
    resampling = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS
    return np.asarray(Image.fromarray(image).resize((width, height), resampling)), scale


def save_figure(figure: Figure, path: str | Path, *, dpi: int) -> None:
    """Save a PNG of a figure; its folder is made."""
    with writing(Path(path)) as temporary:
        figure.savefig(temporary, dpi=dpi, format="png")
    declare_output(Path(path))
