"""Assignment of predictions to targets."""

from vitkit.matchers.hungarian import HungarianMatcher

__all__ = ["HungarianMatcher"]
