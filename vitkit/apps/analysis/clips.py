"""Count the costs of clip backbones by the number of frames and the crop size, as in figure 3 of TimeSformer's
paper."""

from dataclasses import dataclass

import torch

from vitkit.apps.analysis.activations import FusedAttention
from vitkit.apps.analysis.macs import count_macs
from vitkit.apps.analysis.memory import attention_matrices, saved_bytes
from vitkit.errors import ConfigError, DataError
from vitkit.registry import BACKBONES, parameters_of

CLIPS = {
    "frames": [(frames, 224) for frames in (8, 16, 32, 64, 96)],
    "crop": [(8, size) for size in (224, 256, 288, 336, 448, 560)],
}
"""The quantity that varies -> the (frames, side of the crop in pixels) of each clip."""


@dataclass
class ClipCost:
    """The cost of a classifier on one clip."""

    macs: int
    saved_bytes: int
    """Bytes that a training step in float32 saves for the backward pass, with a fused attention kernel."""
    attention_bytes: int
    """Bytes of all attention matrices in float32, which a fused kernel does not store."""


def clip_cost(name: str, frames: int, crop: int) -> ClipCost:
    """Count on the meta device, which takes neither memory nor much time.

    Args:
        name: name of a clip backbone; its position tables are made for the size of the clip.
        frames: number of frames.
        crop: side of the frames in pixels.
    Raises:
        ConfigError: the backbone takes no clips.
    """
    constructor, _ = BACKBONES.resolve(name)
    made_for = dict(num_frames=frames, image_size=crop)
    arguments = {key: value for key, value in made_for.items() if key in parameters_of(constructor)}
    with torch.device("meta"):
        model = BACKBONES.build(name, num_classes=400, **arguments).eval()
        clip = torch.zeros(1, 3, frames, crop, crop)
        try:
            macs = count_macs(model, clip).total
        except DataError as error:
            raise ConfigError(f"backbone {name}: cannot be counted on clips: {error}") from error
        matrices = attention_matrices(model, clip)
        with FusedAttention():
            saved = saved_bytes(lambda: model.train()(clip).sum(), [model])
    stored = sum(clip.element_size() * matrix.elements() for matrix in matrices.values())
    return ClipCost(macs, saved, stored)
