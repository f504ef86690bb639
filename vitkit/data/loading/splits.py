"""Builds the datasets of training, validation and test, chooses a fraction of one, and matches their classes."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from vitkit.data.datasets.base import BaseImageDataset
from vitkit.errors import ConfigError, DataError
from vitkit.io.folders import one_form
from vitkit.io.image_files import find_root
from vitkit.protocols.dataset import Dataset
from vitkit.registry import DATASETS, Spec
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")
FRACTION_KEYS = ("fraction", "fraction_seed")
"""Keys of any dataset's spec that choose what is trained on."""
Split = Literal["train", "val", "test"]


def build_dataset(
    spec: Spec,
    root: str = "data",
    *,
    key: str = "data",
    max_image_pixels: int | None = None,
    channels: int | None = None,
) -> Dataset:
    """Build a dataset.

    Args:
        spec: spec of a registered dataset. Its `fraction` and `fraction_seed`, if any, are for `DataSettings.dataset`.
        root: replaces `{root}` in the spec's strings; if it is a pack, the folder that stands for it does.
        key: the spec's config key ("data.train"), for error messages.
        max_image_pixels: see `DataSettings`; None: its default.
        channels: see `DataSettings`.
    Raises:
        ConfigError: an argument is unknown or invalid, or there are `channels` but no image files.
        DataError: the data are missing or invalid.
    """
    try:
        if isinstance(spec, Mapping):
            # A spec without {root} does not need what it stands for.
            spec = _with_root(spec, find_root(root) if "{root}" in str(spec) else root)
            spec = {name: value for name, value in spec.items() if name not in FRACTION_KEYS}
        dataset = DATASETS.build(spec)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    if max_image_pixels is not None:
        dataset.max_image_pixels = max_image_pixels
    if channels is not None:
        if not isinstance(dataset, BaseImageDataset) or dataset.is_video:
            raise ConfigError(f"data.channels={channels}: {type(dataset).__name__} has no image files. Leave it out.")
        dataset.channels = channels
    return dataset


def _with_root(value: Any, root: str) -> Any:
    """Return a value of a spec with `root` in place of `{root}`, also in the specs within it."""
    if isinstance(value, str):
        return value.replace("{root}", root)
    if isinstance(value, Mapping):
        return {name: _with_root(inner, root) for name, inner in value.items()}
    return [_with_root(inner, root) for inner in value] if isinstance(value, list | tuple) else value


def choose_fraction(
    count: int, fraction: float, seed: int | None = None, image_classes: tuple[np.ndarray, np.ndarray] | None = None
) -> np.ndarray:
    """Choose a fraction of a number of images or lines, at least one: their indices, ascending.

    With one seed, a smaller fraction is a subset of a larger one.

    Args:
        seed: of the choice; with one, it is stratified: of the images that show the same set of classes, about the same
            fraction is chosen. None: always the same choice, which is not stratified.
        image_classes: of the images, see `Dataset`; None: they are not stratified.
    """
    size = max(1, round(fraction * count))
    if seed is None:
        return np.sort(np.random.default_rng(0).permutation(count)[:size])
    classes_of = [[] for _ in range(count)]
    for image, label in zip(*(column.tolist() for column in image_classes or ())):
        classes_of[image].append(label)
    strata: dict[tuple[int, ...], list[int]] = {}
    for image, labels in enumerate(classes_of):
        strata.setdefault(tuple(sorted(labels)), []).append(image)
    random, ranks = np.random.default_rng(seed), np.empty(count)
    for members in strata.values():
        # Evenly spaced in 0..1, so that any beginning of the order has the strata in proportion.
        ranks[random.permutation(members)] = (np.arange(len(members)) + random.random()) / len(members)
    return np.sort(np.argsort(ranks, kind="stable")[:size])


def can_be_renumbered(classes: Sequence[str], others: Sequence[str]) -> bool:
    """Whether classes are others in another order, or without some of them, and so can take their numbers."""
    is_unique = len({one_form(name) for name in classes}) == len(classes)
    return list(classes) != list(others) and not names_without(classes, others) and is_unique


def names_without(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the names that others lack, in whatever form those are written."""
    forms = {one_form(name) for name in others}
    return [name for name in names if one_form(name) not in forms]


def match_record(dataset: Dataset, record: Mapping[str, Any], *, resumed: Any = None) -> None:
    """Number a dataset's labels as a checkpoint does, by the names of its classes; the dataset may lack some.

    Args:
        record: what the checkpoint holds besides its weights.
        resumed: the checkpoint, if its run continues with this training data, which then must have the same classes.
    Raises:
        DataError: the resumed run's data have changed otherwise than in the order of their classes.
    """
    recorded, names = list(record.get("classes") or ()), list(dataset.classes or ())
    lacking, new = names_without(recorded, names), names_without(names, recorded)
    if names and can_be_renumbered(names, recorded):
        _take_classes(dataset, record)
    if record.get("keypoints") and dataset.keypoints is not None:
        init = f" To go on with other keypoints, start a new run from its weights: --init {resumed}." if resumed else ""
        _take_keypoints(dataset, record["keypoints"]["names"], f"{resumed or 'the checkpoint'}: its run has", init)
    if resumed is None or not recorded:
        return
    changes = [f"lacks {', '.join(map(repr, lacking))[:200]}"] if lacking else []
    changes += [f"has {', '.join(map(repr, new))[:200]} in addition"] if new else []
    changes += _other_kinds(dataset, record)
    if not changes and dataset.prompts is None and list(dataset.classes or ()) != recorded:
        changes = ["has them in another order"]
    if changes:
        raise DataError(
            f"{resumed}: its run has the classes {', '.join(recorded)[:200]}; data.train {' and '.join(changes)}. To "
            f"go on with other classes, start a new run from its weights: --init {resumed}."
        )


def _take_classes(dataset: Dataset, record: Mapping[str, Any]) -> None:
    """Give a dataset the recorded classes, ids and kinds, if it can be given classes."""
    if type(dataset).use_classes is Dataset.use_classes:
        return
    lacking = names_without(record["classes"], dataset.classes)
    dataset.use_classes(record["classes"], record.get("category_ids"))
    if dataset.things is not None and record.get("things"):
        kinds = zip(record["classes"], dataset.things, record["things"])
        dataset.things = [recorded if name in lacking else own for name, own, recorded in kinds]


def _take_keypoints(dataset: Dataset, names: Sequence[str], owner: str, remedy: str) -> None:
    """Put a dataset's keypoints in the order of these names; raise a DataError if they are others."""
    own = list(dataset.keypoints.names)
    if set(own) != set(names):
        lacking = [name for name in names if name not in own]
        new = [name for name in own if name not in names]
        changes = [f"lacks {', '.join(lacking)[:200]}"] * bool(lacking) + [f"has {', '.join(new)[:200]}"] * bool(new)
        raise DataError(
            f"{owner} the keypoints {', '.join(names)[:200]}; {dataset.annotation_file or type(dataset).__name__} "
            f"{' and '.join(changes)}.{remedy}"
        )
    if own != list(names):
        dataset.use_keypoints(names)


def follow_keypoints(dataset: Dataset, record: Mapping[str, Any]) -> None:
    """Put a dataset's keypoints in the order of those that weights to start from were trained on, by their names."""
    names = (record.get("keypoints") or {}).get("names")
    if names is None or dataset.keypoints is None or list(names) == list(dataset.keypoints.names):
        return
    own = dataset.keypoints.names
    if set(own) == set(names):
        dataset.use_keypoints(names)
    elif len(own) == len(names):
        pairs = ", ".join(f"{new} from {old}" for new, old in zip(own, names) if new != old)
        logger.warning(
            "data.train has other keypoints than the weights, whose rows they get by number: %s", pairs[:300]
        )


def _other_kinds(dataset: Dataset, record: Mapping[str, Any]) -> list[str]:
    """Describe the classes that are things in only one of a dataset and a record."""
    recorded, kinds = dict(zip(record.get("classes") or (), record.get("things") or ())), ("stuff", "things")
    return [
        f"has {name!r} as {kinds[is_thing]}, not {kinds[not is_thing]}"
        for name, is_thing in zip(dataset.classes or (), dataset.things or ())
        if recorded.get(name, is_thing) != is_thing
    ]


def match_classes(train: Dataset, val: Dataset) -> None:
    """Give val the classes of train, under the same ids, by name: it may lack some, or number them differently.

    With prompts it may also have others, which are then found by their phrases.

    Raises:
        DataError: val has a class that train lacks, or one that is a thing as stuff.
        ConfigError: `data.prompts.phrases` has a class that neither has.
    """
    if train.prompts is not None:
        train.prompts.check_names(train, val)
    if train.keypoints is not None and val.keypoints is not None:
        _take_keypoints(val, train.keypoints.names, "data.train has", " Give both the same keypoints.")
    if train.classes is None or val.classes is None:
        return
    record = {"classes": train.classes, "category_ids": train.category_ids, "things": train.things}
    same_ids = train.category_ids is None or list(train.category_ids) == list(val.category_ids or ())
    if can_be_renumbered(val.classes, train.classes) or (list(val.classes) == list(train.classes) and not same_ids):
        if lacking := names_without(train.classes, val.classes):
            logger.info("data.val has nothing of %s: %s", pluralize(len(lacking), "classes"), ", ".join(lacking)[:200])
        _take_classes(val, record)
    if train.prompts is None:
        check_same_classes(train, val)
    elif new := names_without(val.classes, train.classes):
        logger.info("data.val has %s that data.train has not: %s", pluralize(len(new), "classes"), ", ".join(new)[:200])
    if others := _other_kinds(val, record):
        raise DataError(f"data.val {' and '.join(others)} as in data.train. Correct `isthing` in one of them.")


def check_same_classes(train: Dataset, val: Dataset) -> None:
    """Raise a DataError unless two datasets have the same classes in one order, and with the same ids if both have."""
    have_ids = train.category_ids is not None and val.category_ids is not None
    train_names, val_names = (
        dict(zip(dataset.category_ids, dataset.classes) if have_ids else enumerate(dataset.classes))
        for dataset in (train, val)
    )
    if train_names != val_names:
        ids = sorted(i for i in train_names.keys() | val_names.keys() if train_names.get(i) != val_names.get(i))
        raise DataError(
            f"data.train has {pluralize(len(train_names), 'classes')} and data.val has {len(val_names)}; "
            f"they differ at id {ids[0]}: {train_names.get(ids[0])!r} and {val_names.get(ids[0])!r}. data.val "
            "may lack classes of data.train, but not have others: add images of them to data.train, or name the "
            "classes to use, data.classes=[…]."
        )
    if list(train.classes) != list(val.classes):
        raise DataError(
            f"data.val, {type(val).__name__}, lists the classes of data.train in another order: "
            f"{', '.join(val.classes)[:200]} in place of {', '.join(train.classes)[:200]}. Labels are numbers in this "
            "order: use one order, or give the dataset `use_classes` (vitkit/protocols/dataset.py)."
        )
