"""Checks, before the first epoch, that the parts that a config names provide what a run needs."""

import logging
import traceback
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError, DataError
from vitkit.protocols.criterion import Criterion
from vitkit.protocols.dataset import Dataset
from vitkit.protocols.evaluator import Evaluator
from vitkit.protocols.model import child

logger = logging.getLogger("vitkit")
_DATASET = "See class Dataset in vitkit/protocols/dataset.py, and Sample in vitkit/structures.py."
_EVALUATOR = "See class Evaluator in vitkit/protocols/evaluator.py."
_CRITERION = "See class Criterion in vitkit/protocols/criterion.py."


def check_sample(dataset: Dataset, key: str, *, needs_targets: Sequence[str]) -> None:
    """Check the first two samples of a dataset; datasets with a `collate` of their own have samples of any form.

    Args:
        key: the dataset's config key.
        needs_targets: the fields that every target must have.
    Raises:
        DataError: a sample cannot be loaded, or does not have the form of `Sample`.
    """
    if dataset.collate is None:
        for index in dataset.training_indices()[:2]:
            _check_sample(dataset, int(index), f"{key}: dataset {type(dataset).__name__}", needs_targets)


def _check_sample(dataset: Dataset, index: int, name: str, needs_targets: Sequence[str]) -> None:
    try:
        sample = dataset[index, 0]
    except (TypeError, IndexError, KeyError) as error:
        # What a dataset raises that takes (index, seed) for an index; an error of its own is named as well.
        raise DataError(
            f"{name}[{index}, 0] raises {_describe(error)}. Samples are loaded by (index, seed). {_DATASET}"
        ) from error
    if not isinstance(sample, Mapping) or not {"image", "target"} <= sample.keys():
        got = list(sample) if isinstance(sample, Mapping) else type(sample).__name__
        raise DataError(f"{name}: its samples are {got}; expected a dict with 'image' and 'target'. {_DATASET}")
    _check_image(sample["image"], name)
    target = sample["target"]
    missing = [field for field in needs_targets if field not in target]
    if missing:
        raise DataError(f"{name}: its targets have {_list(target)}, but not {_list(missing)}. {_DATASET}")
    ids = dataset.image_ids if "image_id" in needs_targets else None  # only what is evaluated is found by it
    if ids is not None and index < len(ids) and str(ids[index]) != str(_number_of(target["image_id"])):
        got = f"sample {index} has image_id {target['image_id']!r}, and is {ids[index]!r} in its image_ids"
        raise DataError(f"{name}: {got}; predictions would be compared with another image's objects. {_DATASET}")
    boxes = target.get("boxes_cxcywh")
    if boxes is None or not boxes.numel():
        return
    if not 0 <= boxes.min() <= boxes.max() <= 1.001:
        raise DataError(
            f"{name}: target has boxes_cxcywh from {boxes.min():.4g} to {boxes.max():.4g}; expected center, width and "
            f"height in 0..1 of the image. {_DATASET}"
        )
    (x, y), (width, height) = (part.unbind(-1) for part in boxes.reshape(-1, 4).split(2, dim=-1))
    leaves = torch.stack([x - width / 2, y - height / 2, 1 - x - width / 2, 1 - y - height / 2]).min() < -0.05
    if leaves and ((width > x) & (height > y)).all():
        logger.warning(
            f"{name}: the boxes_cxcywh of sample {index} leave its image, and would be boxes within it as x1 y1 x2 y2. "
            "Expected are center, width and height."
        )


def _number_of(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _check_image(image: Any, name: str) -> None:
    is_image = isinstance(image, Tensor) and image.dtype == torch.uint8 and image.ndim >= 3
    if is_image and image.shape[0 if image.ndim < 5 else 1] == 3:
        return
    if isinstance(image, Tensor) and image.dtype == torch.uint16 and image.ndim == 3:  # any number of channels
        return
    shape = f", shape {tuple(image.shape)}" if hasattr(image, "shape") else ""
    got = f"{type(image).__name__}{shape}" + (f", {image.dtype}" if hasattr(image, "dtype") else "")
    raise DataError(
        f"{name}: its images are {got}; expected a uint8 tensor (3, H, W) of RGB in 0..255, or a uint16 tensor "
        f"(C, H, W). {_DATASET}"
    )


def check_outputs(model: nn.Module, criterion: Criterion, outputs: Any) -> None:
    """Check that a model's outputs have the fields that its criterion needs.

    Raises:
        ConfigError: a field is missing; the error names the model's head.
    """
    head = child(model, "head")
    name = f"model {type(model).__name__}" if head is None else f"head {type(head).__name__}"
    if not isinstance(outputs, Mapping):
        raise ConfigError(
            f"{name}: returns {type(outputs).__name__}; expected a dict of outputs by name. See class Head in "
            "vitkit/protocols/model.py."
        )
    missing = [field for field in criterion.needs_outputs if field not in outputs]
    if missing:
        raise ConfigError(
            f"{name}: returns {_list(outputs)}, but criterion {type(criterion).__name__} also needs "
            f"{_list(missing)}. See {type(criterion).__name__}.forward, and class Head in vitkit/protocols/model.py."
        )


def check_losses(criterion: Criterion, losses: Any) -> None:
    """Check that a criterion returned scalar losses by name.

    Raises:
        ConfigError: it returned something else.
    """
    name = f"criterion {type(criterion).__name__}"
    if not isinstance(losses, Mapping) or not losses:
        raise ConfigError(f"{name}: returns {losses!r:.100}; expected a dict of losses by name. {_CRITERION}")
    for term, value in losses.items():
        if not isinstance(value, Tensor) or value.ndim:
            got = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
            raise ConfigError(f"{name}: loss {term!r} {got}; expected a scalar tensor. {_CRITERION}")


def check_metrics(evaluator: Evaluator, metrics: Any) -> None:
    """Check that an evaluator's metrics are numbers by name.

    Raises:
        ConfigError: they are not.
    """
    name = f"evaluator {type(evaluator).__name__}"
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"{name}.compute: returns {metrics!r:.100}; expected a dict of metrics by name. {_EVALUATOR}")
    for key, value in metrics.items():
        if not isinstance(value, Real):
            raise ConfigError(f"{name}.compute: {key!r} is {value!r:.100}; expected a number. {_EVALUATOR}")


def missing_part_error(error: KeyError | AttributeError) -> ConfigError:
    """Return the error for a field or a member that a part looked up in vain, without declaring that it needs it."""
    field = "the first validation batch, or what the model predicts for it, has no such field"
    what = field if isinstance(error, KeyError) else "there is no such member"
    return ConfigError(
        f"{_describe(error)}: {what}, which this line reads. See vitkit/protocols for what each part passes on."
    )


def _describe(error: Exception) -> str:
    """Return an error with the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"


def _list(names: Any) -> str:
    return ", ".join(map(repr, names)) or "nothing"
