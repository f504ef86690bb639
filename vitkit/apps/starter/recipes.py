"""The settings that `vitkit.start` considers for each task, and the measured figures that they are based on."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitkit.apps.starter.own_data import OwnData
from vitkit.text_format import pluralize

Network = Literal["small", "resnet50", "res3"]
"""What is trained: the task's small network from random weights, or one on a ResNet-50 from ImageNet's, which ends at
res4 or res3 in detection."""


class RecipeFigure(NamedTuple):
    """A figure that a recipe has reached."""

    network: Network
    steps: int
    metrics: str


class SmallFirst(NamedTuple):
    """A short run that begins with small images; costs are those of a step in parts of one in a long run."""

    below: int
    """The number of steps of a long run below which a run is short."""
    until_share: float
    """The part of the run with small images."""
    small_cost: float
    large_cost: float
    """The cost of a step with small and with large images."""

    @property
    def mean_cost(self) -> float:
        """The mean cost of a step."""
        return self.until_share * self.small_cost + (1 - self.until_share) * self.large_cost

    def relative_cost(self, share: float) -> float:
        """Return what a step costs after a share of the run, in parts of the mean."""
        return (self.small_cost if share < self.until_share else self.large_cost) / self.mean_cost


@dataclass(frozen=True)
class Recipe:
    """The settings that are considered for a task, and the figures that they are based on."""

    sizes: dict[int, int]
    """Short sides of the validation images in pixels, the smallest first, each with the number of training steps that
    it must leave time for."""
    data: str = ""
    """The data of the figures."""
    measured: tuple[RecipeFigure, ...] = ()
    """The figures, with the fewest steps first."""
    freeze_below: int = 0
    """The number of steps below which a pretrained backbone is frozen up to res3, which halves the cost of a step."""
    objects_for_res3: int | None = None
    """The number of training objects of each class from which on a processor a ResNet-50 from ImageNet's weights ends
    at res3, where a step takes half the time and as many reach the same AP in a short run; None: never."""
    steps_for_res4: int = 0
    """The number of such steps from which on a ResNet-50 up to res4 reaches a higher AP in their time."""
    few_objects: str = ""
    """What to expect with fewer objects of each class."""
    small_first: SmallFirst | None = None
    """How a short run of the smallest size begins, unless on a ResNet-50 up to res4; None: as any other."""

    def sizes_for(self, data: OwnData) -> list[int]:
        """Return the sizes up to that of the images, or else the smallest."""
        return [size for size in self.sizes if size <= data.short_side] or [min(self.sizes)]

    def has_many_objects(self, data: OwnData) -> bool:
        """Whether each class with training objects has about as many as in the data of the figures."""
        return self.objects_for_res3 is not None and data.fewest_objects >= self.objects_for_res3

    def expectation(self, network: Network, steps: int, step_minutes: float, data: OwnData) -> str:
        """Return the figure with the most steps up to `steps`, or else with the fewest, and its data.

        Args:
            step_minutes: what a step takes on this machine.
        """
        figures = [figure for figure in self.measured if figure.network == network]
        if not figures:
            return "no figure: this recipe has not been measured"
        figure = next((figure for figure in reversed(figures) if figure.steps <= steps), figures[0])
        less = [f"after only {pluralize(steps, 'steps')}"] * (steps < figure.steps)
        less += ["with more classes", "or with fewer objects of each"]
        text = (
            f"{figure.metrics} after {pluralize(figure.steps, 'steps')}, which take "
            f"{figure.steps * step_minutes:.0f} min here, as on {self.data}; less {', '.join(less)}"
        )
        return text if self.has_many_objects(data) or not self.few_objects else f"{text}: {self.few_objects}"


RECIPES = {
    "detection": Recipe(
        # In equal time 224 pixels are better up to the 6592 steps measured on blood cells; twice as many is a guess.
        {224: 0, 272: 12000, 320: 12000, 416: 12000, 512: 12000},
        "205 photos of blood cells (configs/bccd/measurements.md)",
        (
            RecipeFigure("small", 824, "AP 0.488, AP50 0.784"),
            RecipeFigure("small", 1648, "AP 0.577, AP50 0.856"),
            RecipeFigure("small", 2472, "AP 0.603, AP50 0.880"),
            RecipeFigure("small", 3296, "AP 0.618, AP50 0.886"),
            RecipeFigure("small", 4944, "AP 0.627, AP50 0.893"),
            RecipeFigure("small", 5768, "AP 0.633, AP50 0.896"),
            # The rest is from before sampling by pixels (rounds_padding=False).
            RecipeFigure("resnet50", 824, "AP 0.497, AP50 0.812"),
            RecipeFigure("resnet50", 1648, "AP 0.571, AP50 0.858"),
            RecipeFigure("resnet50", 2472, "AP 0.601, AP50 0.874"),
            RecipeFigure("resnet50", 3296, "AP 0.616, AP50 0.887"),
            RecipeFigure("resnet50", 4120, "AP 0.627, AP50 0.895"),
            RecipeFigure("resnet50", 4944, "AP 0.629, AP50 0.899"),
            RecipeFigure("resnet50", 5768, "AP 0.632, AP50 0.902"),
            RecipeFigure("resnet50", 6592, "AP 0.632, AP50 0.902"),
            RecipeFigure("res3", 824, "AP 0.482, AP50 0.816"),
            RecipeFigure("res3", 1133, "AP 0.553, AP50 0.856"),
            RecipeFigure("res3", 1648, "AP 0.569, AP50 0.865"),
            RecipeFigure("res3", 2472, "AP 0.585, AP50 0.879"),
            RecipeFigure("res3", 3296, "AP 0.591, AP50 0.874"),
            RecipeFigure("res3", 4944, "AP 0.609, AP50 0.884"),
            RecipeFigure("res3", 6592, "AP 0.616, AP50 0.890"),
        ),
        freeze_below=1500,
        objects_for_res3=100,
        steps_for_res4=6000,
        small_first=SmallFirst(below=3000, until_share=0.6, small_cost=0.54, large_cost=0.95),
        few_objects="AP50 0.008 to 0.045 from 50 photos of COCO with 49 classes, after 936 steps from ImageNet weights",
    ),
    "semantic": Recipe(
        {240: 0, 360: 2000, 480: 2000},
        "367 frames of streets (configs/start/semantic.py)",
        (RecipeFigure("resnet50", 1840, "mIoU 0.677"),),
    ),
    "instance": Recipe({256: 0, 320: 4000, 416: 4000}),
    "keypoints": Recipe({224: 0, 320: 12000, 416: 12000}),
    "panoptic": Recipe({256: 0, 320: 4000, 416: 4000}),
    "classification": Recipe({128: 0, 224: 1500}),
}
