"""The base of models that are prompted with text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


class TextReading(NamedTuple):
    """A text prompt, as a model reads it."""

    phrases: Sequence[str]
    """What it names, the classes of what is detected; empty if they differ from image to image, as for a caption."""
    words: Sequence[str]
    """Its words: the columns of the model's `pred_logits` (B, Q, words), a sigmoid each, and of its attention to the
    prompt."""
    phrase_of: Sequence[int]
    """The number of each word's phrase; -1 for a word of none, such as a separator."""
    tokens: Any = None
    """What `encode_text` encodes."""


class TextPrompted:
    """Base of models that take "text", in addition to the model's other base."""

    takes = ("images", "text")

    def read_text(self, text: Any) -> TextReading:
        """Return the phrases and words of a text, which depend on no weights.

        Raises:
            DataError: the model cannot read the text.
        """
        raise NotImplementedError

    def text_parts(self) -> Sequence[nn.Module]:
        """Return the modules that `encode_text` runs; none if a text is only encoded together with the images."""
        return ()

    def encode_text(self, reading: TextReading, num_images: int, device: torch.device) -> Any:
        """Return a text, encoded for so many images, which `forward` takes in place of a list of texts."""
        raise NotImplementedError

    def example_prompts(self, batch_size: int) -> dict[str, Any]:
        """Return the inputs, besides images, with which the model's costs are counted."""
        return {"text": ["a person. a red car. a dog."] * batch_size}
