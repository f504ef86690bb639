"""Denoising queries of detectors whose classes are phrases of a text."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitkit.errors import DataError
from vitkit.nn.layers import Linear
from vitkit.registry import TRAINING_QUERIES
from vitkit.structures import DetectionTarget
from vitkit.training_queries.box_denoising import BoxDenoising, Noise


@TRAINING_QUERIES.register
class TextDenoising(BoxDenoising):
    """Contrastive denoising (CDN) whose queries start from the encoded phrase of their class.

    Their content is a projection of the phrase's encoded text, the target's `phrase_features`, and a noised label is
    another phrase of the same prompt. In MM-Grounding-DINO, which `BoxDenoising` reproduces, it is a learned vector for
    the place in the prompt, where a class stands by chance, and noised labels may be places that no phrase has.

    Args: see `BoxDenoising`.
    """

    def make_label_embed(self, d_model: int) -> nn.Module:
        layer = Linear(d_model, d_model)
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer

    def contents(self, labels: Tensor, noise: Noise, targets: Sequence[DetectionTarget], num_copies: int) -> Tensor:
        """Return the content of each copied target, (K, d_model); see `BoxDenoising`.

        Raises:
            DataError: the targets have no `phrase_features`.
        """
        if any("phrase_features" not in target for target in targets):
            raise DataError(
                "TextDenoising: the targets have no phrase_features. Use it with a model of type GroundingDINO."
            )
        features = [target["phrase_features"] for target in targets]
        sizes = torch.tensor([[len(target["labels"]), len(each)] for target, each in zip(targets, features)])
        num_targets, num_phrases = sizes.unbind(1)
        starts = num_phrases.cumsum(0) - num_phrases
        of_target = torch.stack((starts, num_phrases)).repeat_interleave(num_targets, dim=1).repeat(1, num_copies)
        start, count = of_target.to(labels.device, non_blocking=True)
        other = noise.new_labels * count // self.num_classes  # drawn below the number of classes
        labels = labels.where(noise.label_chance >= self.label_noise / 2, other)
        # Labels out of range are reported by the matcher, which can name the image.
        return self.label_embed(torch.cat(features)[start + labels.clamp(min=0).minimum(count - 1)])
