"""Draw the figure of vitkit/README.md: the parts that images and sentences pass through, and their attention core.

Run:  python model_zoo/draw_architecture.py model_zoo/architecture.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

COLUMNS = {  # title -> text in the box, color
    "backbones": ("ViT · Swin · Swin V2\nMViT · LR-Net · ResNet\nnon-local · any of timm", "#dbe9f6"),
    "necks": ("projection\npyramid\npixel decoders", "#e2f0d9"),
    "heads": ("DETR · MaskFormer\nDeformable DETR\nMask2Former · per pixel", "#fde9d9"),
    "losses": ("set and mask criteria\nHungarian matching\nby scipy", "#f4dcec"),
    "evaluation": ("box and mask AP\nPQ · mIoU · top-1\nBLEU · CIDEr-D", "#eeeeee"),
}
SEQ2SEQ = ("seq2seq", "RNN with attention · Transformer\nlanguage models · Show, Attend and Tell", "#fff2cc")
CORE = "nn.attention: one core for every model, its weights recorded by AttentionRecorder"
KERNELS = "kernels: each fast path beside the plain form that defines it"
LOOP = "engine: one loop for every task · DDP and FSDP2 · exact resume · hooks"


def draw_box(axes: Axes, rectangle: tuple[float, float, float, float], title: str, text: str, color: str) -> None:
    """Draw a rounded box (left, bottom, width, height) with a bold title above its text."""
    left, bottom, width, height = rectangle
    shape = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle=shape, facecolor=color, edgecolor="#555555"))
    middle = left + width / 2
    if text:
        axes.text(middle, bottom + height - 0.28, title, ha="center", va="center", weight="bold", fontsize=11)
        axes.text(middle, bottom + (height - 0.4) / 2, text, ha="center", va="center", fontsize=8.6, linespacing=1.4)
    else:
        axes.text(middle, bottom + height / 2, title, ha="center", va="center", fontsize=10)


def draw_arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#555555", "lw": 1.4})


def draw_architecture(path: Path) -> None:
    """Write the figure to `path` in the format of its extension."""
    figure, axes = plt.subplots(figsize=(12, 5.2))
    axes.set(xlim=(0, 15.2), ylim=(0, 6.6), aspect="equal")
    axes.axis("off")
    width, gap, left = 2.55, 0.35, 0.55
    draw_box(axes, (0.2, 5.75, 14.8, 0.6), LOOP, "", "#ffffff")
    for index, (title, (text, color)) in enumerate(COLUMNS.items()):
        x = left + index * (width + gap)
        draw_box(axes, (x, 3.75, width, 1.7), title, text, color)
        if index:
            draw_arrow(axes, (x - gap, 4.6), (x, 4.6))
    axes.text(0.1, 4.6, "image", rotation=90, ha="center", va="center", fontsize=10, style="italic")
    axes.text(0.1, 2.6, "text", rotation=90, ha="center", va="center", fontsize=10, style="italic")
    draw_box(axes, (left + width + gap, 1.95, 2 * width + gap, 1.35), *SEQ2SEQ)
    draw_arrow(axes, (0.25, 2.6), (left + width + gap, 2.6))
    draw_arrow(axes, (left + width / 2, 3.75), (left + width + gap, 2.95))  # captioners read the backbone's feature map
    right = left + 3 * (width + gap)
    draw_arrow(axes, (right - gap, 2.6), (right + width / 2, 3.75))
    draw_box(axes, (0.2, 0.95, 14.8, 0.6), CORE, "", "#cfe2f3")
    draw_box(axes, (0.2, 0.2, 14.8, 0.6), KERNELS, "", "#d9d9d9")
    figure.savefig(path, dpi=110, bbox_inches="tight", facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where to write the figure, such as model_zoo/architecture.png")
    draw_architecture(parser.parse_args().out)
