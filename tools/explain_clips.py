"""The figures of explain.py for clip models."""

import argparse

from torch import Tensor

from vitkit.errors import ConfigError, DataError
from vitkit.explanations.clip_drawing import draw_clip_attention
from vitkit.explanations.clips import ClipAttention, clip_attention
from vitkit.explanations.html_page import write_explain_page
from vitkit.explanations.pages import clip_page
from vitkit.inference import Predictor
from vitkit.inference.videos import clip_of


def explain_clip(predictor: Predictor, args: argparse.Namespace) -> None:
    """Draw what points of a frame, and the class token, attend to in the clip from the middle of a video."""
    views = clip_of(predictor, args.video)
    clip = views[len(views) // 2]  # the crop in the middle
    _, num_frames, height, width = clip.shape
    frame = num_frames // 2 if args.frame is None else args.frame
    if not 0 <= frame < num_frames:
        raise ConfigError(f"--frame: got {frame}; the clip's frames are 0 to {num_frames - 1}.")
    for x, y in args.points or ():
        if not (0 <= x < width and 0 <= y < height):
            raise DataError(f"--points: {x:g},{y:g} is outside the clip of {width}x{height} pixels (width x height).")
    attention = clip_attention(predictor.model, clip[None].to(predictor.device), args.encoder_layer)
    points = args.points or [brightest(attention.class_token[..., frame], (height, width))]
    maps = [((frame, x, y), of_point(attention, frame, x, y, (height, width))) for x, y in points]
    path = args.out / f"{args.video.stem}_attention.png"
    layer = len(predictor.model.backbone.blocks) - 1 if args.encoder_layer is None else args.encoder_layer
    title = f"{predictor.model.backbone.attention} attention, layer {layer}, mean of the heads"
    draw_clip_attention(clip, attention.class_token, maps, path, title=title)
    print(predictor.report)
    print(f"wrote {path}")
    if args.html:
        strip = clip.permute(2, 1, 3, 0).flatten(1, 2).cpu().numpy()  # frames side by side
        path = path.with_suffix(".html")
        write_explain_page(clip_page(attention), path, title=title, image=strip)
        print(f"wrote {path}")


def brightest(weights: Tensor, size: tuple[int, int]) -> tuple[float, float]:
    """Return (x, y) of the centre of a map's largest cell, in pixels of an image of size (height, width)."""
    row, column = divmod(int(weights.flatten().argmax()), weights.shape[1])
    return (column + 0.5) * size[1] / weights.shape[1], (row + 0.5) * size[0] / weights.shape[0]


def of_point(attention: ClipAttention, frame: int, x: float, y: float, size: tuple[int, int]) -> Tensor:
    """Return the attention (h, w, T) of the token that contains a point of a frame."""
    rows, columns, _ = attention.size
    return attention.of_token(int(y * rows / size[0]), int(x * columns / size[1]), frame)
