"""Keypoints in COCO's format (https://cocodataset.org/#format-data): what a file says of them, and their checks."""

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitkit.errors import ConfigError, DataError
from vitkit.io.coco_schema import is_number
from vitkit.io.segmentations import round_pixels
from vitkit.structures import KeypointInfo
from vitkit.text_format import is_name

COCO_SIGMAS = {
    "nose": 0.026,
    **{f"{side}_{name}": sigma for name, sigma in {
        "eye": 0.025, "ear": 0.035, "shoulder": 0.079, "elbow": 0.072, "wrist": 0.062, "hip": 0.107, "knee": 0.087,
        "ankle": 0.089,
    }.items() for side in ("left", "right")},
}  # fmt: skip
"""The published sigmas of COCO's 17 keypoints, in its order."""
DEFAULT_SIGMA = 0.05
"""The sigma of points that are not COCO's, about the median of these."""
_SIDES = {"left": "right", "right": "left", "l": "r", "r": "l"}
_SIDE = re.compile(
    r"(?i:left|right)|(?<![A-Za-z])[LRlr](?![A-Za-z])|(?<=[a-z])[LR](?![A-Za-z])|(?<![A-Za-z])[LR](?=[A-Z]{1,2}[a-z])"
)


def read_keypoint_info(
    categories: Sequence[Mapping[str, Any]], file: str, options: Mapping[str, Any] | None = None
) -> tuple[KeypointInfo, list[str]]:
    """Return what a file's categories, and the options of a dataset in their place, say of their keypoints.

    Returns:
        the keypoints, and notes on what was assumed.
    Raises:
        DataError: no category has keypoints, several have different ones, or what is said of them is wrong.
        ConfigError: an option names a keypoint that does not exist, or is not a pair.
    """
    with_points = [category for category in categories if category.get("keypoints")]
    if not with_points:
        raise DataError(
            f"{file}: none of its {len(categories)} categories has a list 'keypoints' of names. Give a file with "
            "keypoints (person_keypoints_*.json), or train without them (keypoints=False)."
        )
    first = with_points[0]
    for other in with_points[1:]:
        if other["keypoints"] != first["keypoints"]:
            raise DataError(
                f"{file}: category {first['name']!r} has the keypoints {reprlib.repr(first['keypoints'])} and "
                f"{other['name']!r} {reprlib.repr(other['keypoints'])}; expected the same names in the same order. "
                "Make a file of each."
            )
    names, notes = first["keypoints"], []
    where = f"{file}: category {first['name']!r}"
    if not isinstance(names, list) or not all(map(is_name, names)):
        raise DataError(f"{where} has keypoints {reprlib.repr(names)}; expected a list of names. Correct it.")
    options = {**(options or {})}
    for option in ("flip_pairs", "skeleton"):
        if option in options:
            options[option] = [[_place(name, names, option) for name in pair] for pair in options[option]]
        elif first.get(option) is not None:
            options[option] = _from_one(first[option], where, option, len(names))
    if isinstance(options.get("sigmas"), Mapping):
        given = {names[_place(name, names, "sigmas")]: sigma for name, sigma in options["sigmas"].items()}
        options["sigmas"] = [given.get(name, COCO_SIGMAS.get(name, DEFAULT_SIGMA)) for name in names]
    elif "sigmas" not in options and first.get("sigmas") is not None:
        options["sigmas"] = first["sigmas"]
    if "sigmas" not in options:
        options["sigmas"] = [COCO_SIGMAS.get(name, DEFAULT_SIGMA) for name in names]
        if not COCO_SIGMAS.keys() >= set(names):
            notes.append(f"no sigmas of keypoints: {DEFAULT_SIGMA} for all that are not COCO's")
    if "flip_pairs" not in options:
        options["flip_pairs"] = infer_flip_pairs(names, where)
        pairs = ", ".join(f"{names[a]} and {names[b]}" for a, b in options["flip_pairs"]) or "none"
        notes.append(f"no flip_pairs of keypoints: a mirrored image exchanges, by their names, {pairs}")
    if not isinstance(options["sigmas"], list) or not all(map(is_number, options["sigmas"])):
        raise DataError(f"{where} has sigmas {reprlib.repr(options['sigmas'])}; expected {len(names)} numbers above 0.")
    try:
        return KeypointInfo.from_json({"names": names, "skeleton": [], **options}), notes
    except ValueError as error:
        raise DataError(f"{where}: {error} Correct it, or give it as keypoints=dict(...) of the dataset.") from error


def _place(name: Any, names: Sequence[str], option: str) -> int:
    if name not in names:
        raise ConfigError(f"keypoints.{option}: no keypoint is called {name!r}; expected {', '.join(names)}.")
    return list(names).index(name)


def _from_one(pairs: Any, where: str, field: str, count: int) -> list[list[int]]:
    """Return a file's pairs of points, which it counts from 1, counted from 0."""
    are_pairs = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    if not are_pairs or not all(type(point) is int and 1 <= point <= count for pair in pairs for point in pair):
        raise DataError(
            f"{where} has {field} {reprlib.repr(pairs)}; expected pairs of its {count} keypoints, counted from 1. "
            "Correct it."
        )
    return [[point - 1 for point in pair] for pair in pairs]


def infer_flip_pairs(names: Sequence[str], where: str) -> list[tuple[int, int]]:
    """Return the pairs, counted from 0, of names that differ only in left and right, or l and r as in l_ear or lEar.

    Raises:
        DataError: a name with one of these words has no partner.
    """
    lower, pairs = [name.lower() for name in names], []
    for point, name in enumerate(names):
        partner = _SIDE.sub(lambda found: _SIDES[found[0].lower()], name).lower()
        if partner == lower[point]:  # Lhip says a side only beside Rhip
            partner = _SIDES.get(partner[0], partner[0]) + partner[1:]
            if partner not in lower:
                continue
        if partner not in lower:
            raise DataError(
                f"{where}: keypoint {names[point]!r} has no partner {partner!r}, so which keypoints a mirrored image "
                "exchanges is not known. Give them as keypoints=dict(flip_pairs=[['NAME', 'NAME'], …]) of the dataset."
            )
        if point < lower.index(partner):
            pairs.append((point, lower.index(partner)))
    return pairs


def keypoint_fields(info: KeypointInfo) -> dict[str, Any]:
    """Return the fields of a category with these keypoints; `flip_pairs` and `sigmas` are not COCO's."""
    pairs = {"skeleton": info.skeleton, "flip_pairs": info.flip_pairs}
    fields = {name: [[a + 1, b + 1] for a, b in value] for name, value in pairs.items()}
    return {"keypoints": list(info.names), **fields, "sigmas": list(info.sigmas)}


def points_fields(points: np.ndarray) -> dict[str, Any]:
    """Return the fields of an annotation with these (K, 3) keypoints, rounded to hundredths of a pixel."""
    return {"keypoints": [*map(round_pixels, points.ravel().tolist())], "num_keypoints": int((points[:, 2] > 0).sum())}


def order_keypoints(
    categories: Sequence[dict[str, Any]], annotations: Sequence[dict[str, Any]], info: KeypointInfo
) -> None:
    """Put the keypoints of a file's categories and annotations in a dataset's order, with the number of labeled ones.

    Annotations without keypoints get ones that are not labeled, as pycocotools needs them.
    """
    names = next((category["keypoints"] for category in categories if category.get("keypoints")), list(info.names))
    order = None if list(info.names) == names else [3 * names.index(name) for name in info.names]
    for category in categories:
        if category.get("keypoints"):
            category.update(keypoint_fields(info))
    for annotation in annotations:
        points = annotation.get("keypoints") or [0] * (3 * len(names))
        if order is not None:
            points = [value for start in order for value in points[start : start + 3]]
        annotation.update(keypoints=points, num_keypoints=sum(map(bool, points[2::3])))
