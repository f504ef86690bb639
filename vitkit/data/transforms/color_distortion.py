"""The color augmentation of SSD, as an albumentation."""

from typing import Any

import albumentations as A
import cv2
import numpy as np

from vitkit.data.transforms.annotated_image import check_rgb
from vitkit.registry import ALBUMENTATIONS


@ALBUMENTATIONS.register
class ColorDistortion(A.ImageOnlyTransform):
    """The color augmentation of SSD (Liu et al. 2016, https://arxiv.org/abs/1512.02325).

    Brightness is shifted, contrast and saturation are scaled and the hue is rotated, each with probability 0.5;
    contrast changes either before or after saturation and hue.

    Args:
        brightness: largest shift of pixel values in 0..255.
        contrast: range of the factor.
        saturation: range of the factor.
        hue: largest rotation, in degrees.
    """

    def __init__(
        self,
        *,
        brightness: float = 32,
        contrast: tuple[float, float] = (0.5, 1.5),
        saturation: tuple[float, float] = (0.5, 1.5),
        hue: float = 36,
        p: float = 1.0,
    ):
        super().__init__(p=p)
        self.brightness = brightness
        self.contrast = tuple(contrast)
        self.saturation = tuple(saturation)
        self.hue = hue

    def get_params(self) -> dict[str, Any]:
        """Draw the parameters for one image."""

        def sometimes(low: float, high: float, neutral: float) -> float:
            return self.py_random.uniform(low, high) if self.py_random.random() < 0.5 else neutral

        # Every seeded run depends on the order of these draws.
        return {
            "shift": sometimes(-self.brightness, self.brightness, 0),
            "contrast": sometimes(*self.contrast, 1),
            "contrast_first": self.py_random.random() < 0.5,
            "saturation": sometimes(*self.saturation, 1),
            "rotation": sometimes(-self.hue, self.hue, 0),
        }

    def apply(
        self,
        img: np.ndarray,
        *,
        shift: float,
        contrast: float,
        contrast_first: bool,
        saturation: float,
        rotation: float,
        **params: Any,
    ) -> np.ndarray:
        """Apply the drawn parameters to an (H, W, 3) uint8 RGB image."""
        check_rgb(img, "ColorDistortion")
        levels = np.arange(256, dtype=np.float32)
        img = cv2.LUT(img, to_levels((levels + shift).clip(0, 255) * (contrast if contrast_first else 1)))
        if saturation != 1 or rotation:
            # OpenCV stores the hue in units of two degrees, so that a full turn fits into a byte.
            hues = (levels + rotation / 2) % 180
            tables = np.stack([to_levels(hues), to_levels(levels * saturation), to_levels(levels)], axis=1)
            hsv = cv2.LUT(cv2.cvtColor(img, cv2.COLOR_RGB2HSV), tables[None])
            img = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
        return img if contrast_first else cv2.LUT(img, to_levels(levels * contrast))


def to_levels(values: np.ndarray) -> np.ndarray:
    """Return uint8 values, the nearest below in 0..255."""
    return values.clip(0, 255).astype(np.uint8)
