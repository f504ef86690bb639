"""Evaluate the features of a backbone before and after it was trained without labels."""

from collections.abc import Mapping
from typing import Any

import torch

from vitkit.data.loading.settings import DataSettings
from vitkit.engine.evaluate import evaluate
from vitkit.engine.step import seed_everything
from vitkit.models.pretraining import PretrainingModel
from vitkit.protocols.evaluator import Evaluator
from vitkit.registry import BACKBONES, EVALUATORS, Spec
from vitkit.weights import load_pretrained

_IMAGES_AT_ONCE = 16


def measure_features(
    backbone: Mapping[str, Any], data: Mapping[str, Any], evaluator: Spec, *, device: str
) -> tuple[dict[str, float], Evaluator]:
    """Evaluate a frozen backbone, with the weights that it names or random ones.

    Args:
        data: a config's `data` section, whose `val` is evaluated.
    Returns:
        the metrics, and the evaluator.
    """
    seed_everything(0)
    model = PretrainingModel(BACKBONES.build(backbone))
    load_pretrained(model)
    settings = DataSettings(**{**data, "val_images_per_gpu": _IMAGES_AT_ONCE})
    dataset = settings.dataset("val")
    built = EVALUATORS.build(evaluator, dataset=dataset)
    place = torch.device(device)
    metrics = evaluate(model.to(place), settings.val_loader(dataset), built, device=place)
    return metrics, built
