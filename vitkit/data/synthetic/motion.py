"""Clips of the synthetic world whose class is the direction of motion, which only the order of the frames reveals."""

from collections.abc import Sequence

import numpy as np

from vitkit.data.datasets.clip_sampling import ClipSampling
from vitkit.data.datasets.video import ClipDataset
from vitkit.data.synthetic.world import World
from vitkit.data.transforms.annotated_image import Transforms
from vitkit.errors import ConfigError
from vitkit.io.video_files import ASSUMED_FRAME_RATE, FrameList, Video
from vitkit.registry import DATASETS, Spec, nearest

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


@DATASETS.register
class ShapesMotion(ClipDataset):
    """Clips of one moving thing, whose class is the direction of motion.

    A clip of one direction is a clip of the opposite one in reverse. So a single frame says nothing about the class,
    and neither do all frames of a clip without their order: a model that ignores the order is right no more often than
    chance with only "left" and "right", and no more than half of the time with all four directions.

    Args:
        num_videos: number of clips, divided equally among the classes.
        image_size, max_image_size, min_objects, max_objects, min_size, max_size, seed, split: see `World`.
        directions: the classes, out of "left", "right", "up" and "down".
        num_frames: number of frames in each clip.
        transforms: see `ClipDataset`; flips would contradict the classes.
    Raises:
        ConfigError: a number is out of range, or a direction or the split is unknown.
    """

    def __init__(
        self,
        num_videos: int,
        *,
        image_size: int = 32,
        max_image_size: int | None = None,
        min_objects: int = 1,
        max_objects: int = 1,
        min_size: float = 0.2,
        max_size: float = 0.4,
        seed: int = 0,
        split: str = "train",
        directions: Sequence[str] = ("left", "right"),
        num_frames: int = 8,
        transforms: Spec | Transforms | None = None,
    ):
        for name, value in (("num_videos", num_videos), ("num_frames", num_frames)):
            if value < 1:
                raise ConfigError(f"{name}: got {value}, expected at least 1.")
        for direction in directions:
            if direction not in DIRECTIONS:
                raise ConfigError(f"directions: unknown {direction!r}. {nearest(str(direction), DIRECTIONS)}")
        if min_objects < 1:
            raise ConfigError(f"min_objects: got {min_objects}; expected at least 1, as one object moves.")
        sampling = ClipSampling(num_frames, sampling_rate=1, frame_rate=ASSUMED_FRAME_RATE)
        super().__init__(directions, transforms, sampling)
        self.world = World(image_size, max_image_size, min_objects, max_objects, min_size, max_size, seed, split)
        self.image_ids = range(1, num_videos + 1)

    def label(self, index: int) -> int:
        return index % len(self.classes)

    def image_classes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (len(self),) int64 indices of the clips and their labels."""
        indices = np.arange(len(self))
        return indices, indices % len(self.classes)

    def open(self, index: int) -> Video:
        """Draw the frames of a clip."""
        direction = DIRECTIONS[self.classes[self.label(index)]]
        return FrameList(self.world.slide(index, self.sampling.num_frames, direction))
