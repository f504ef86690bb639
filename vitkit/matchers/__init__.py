"""Assignment of predictions to targets."""

from vitkit.matchers.base import Matcher
from vitkit.matchers.fixed import FixedMaskMatcher
from vitkit.matchers.hungarian import HungarianMatcher
from vitkit.matchers.hungarian_box_masks import HungarianBoxMaskMatcher
from vitkit.matchers.hungarian_masks import HungarianMaskMatcher
from vitkit.matchers.hungarian_tokens import TokenMatcher

__all__ = [
    "FixedMaskMatcher",
    "HungarianBoxMaskMatcher",
    "HungarianMaskMatcher",
    "HungarianMatcher",
    "Matcher",
    "TokenMatcher",
]
