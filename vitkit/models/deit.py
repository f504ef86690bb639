"""DeiT's distillation of classifiers (Touvron et al. 2020, https://arxiv.org/abs/2012.12877)."""

from typing import Any

import torch
from torch import Tensor, nn

from vitkit.models.classifier import Classifier
from vitkit.models.teacher import TaughtModel
from vitkit.ops.images import normalize_images
from vitkit.protocols.model import child
from vitkit.registry import MODELS, Spec


@MODELS.register
class DistilledClassifier(TaughtModel, Classifier):
    """A classifier that also learns from the logits of a frozen one, the teacher, for the same augmented images.

    A ViT with `distilled=True` learns from the labels by its class token and from the teacher by its distillation
    token; its predictions are the mean of both. Any other backbone learns from both by its only logits (Hinton et al.
    2015, https://arxiv.org/abs/1503.02531). The criterion is `ClassificationLoss` with `distillation`.

    Args:
        backbone: spec, or a module that returns logits.
        teacher: spec of a backbone that classifies with the weights that it names, or its default ones ("timm/NAME");
            a run's folder or a checkpoint of vitkit; or a module, a model that returns `logits`. Its classes are the
            student's, in the same order. Images are normalized by its own statistics.
        options: the arguments of `Classifier`.
    """

    def __init__(self, backbone: Spec | nn.Module, teacher: Spec | nn.Module, **options: Any):
        super().__init__(backbone, **options)
        self.num_classes: int = options.get("num_classes", 1000)
        self.set_teacher(teacher)

    def build_teacher(self, backbone: Spec) -> nn.Module:
        """Return a classifier of the student's number of classes."""
        return Classifier(backbone, num_classes=self.num_classes)

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Predict class logits.

        Args:
            images, padding_mask: see `Classifier`.
        Returns:
            logits: (B, num_classes); in training, those of the class token, and
            distillation_logits: (B, num_classes) of the distillation token, or `logits` without one,
            teacher_logits: (B, num_classes), if there is a teacher.
        """
        if not self.training:
            return super().forward(images, padding_mask)
        pixels = normalize_images(images, mean=self.pixel_mean, std=self.pixel_std)
        if child(self.backbone, "head_dist") is not None:
            logits, distillation_logits = self.backbone.separate_logits(pixels)
        else:
            logits = distillation_logits = self.backbone(pixels)
        outputs = {"logits": logits, "distillation_logits": distillation_logits}
        if self.frozen_teacher is not None:
            with torch.no_grad():
                outputs["teacher_logits"] = self.frozen_teacher.network(images)["logits"]
        return outputs
