"""Issues in annotation files: COCO's boxes and masks, and panoptic segments."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from pycocotools import mask as coco_mask
from torchvision.ops import box_convert, box_iou

from vitkit.apps.datasets.fixing import far_outside, format_issues, similar_classes
from vitkit.apps.doctor.issues import Issue, Verdict, enumerate_items, percent
from vitkit.data.datasets.coco_file import BOX_TOLERANCE
from vitkit.data.formats import AnnotatedImages
from vitkit.data.formats.sizes import MAX_FRACTION
from vitkit.errors import DataError
from vitkit.io.coco_schema import AnnotationChecks, FileIssue, segmentation_issues
from vitkit.io.keypoints import read_keypoint_info
from vitkit.io.segmentations import encode_segmentation, object_area
from vitkit.text_format import pluralize

_MASK_TOLERANCE = 2.0
"""Pixels by which a mask's bounding box may differ from its annotated box: annotation tools round both."""
_MIN_MASK_IOU = 0.5  # of a mask's bounding box and its annotated box; below it, one of them is wrong
_TINY_AREA = 16.0  # pixels, 4 x 4
_LARGE_BOX = 9.0  # pixels; an area of 0 or 1 in a box of at least this size is a placeholder
_MIN_ALIKE, _MAX_SWAPPED = 20, 0.1
"""Objects whose keypoints lie the same way round, and the fraction of others up to which these are suspected."""
_SAME_OBJECT_IOU = 0.8
"""IoU above which two boxes of one class probably label one object twice."""
_MIN_WITHIN = 0.99
"""The smallest fraction of a polygon's pixels in another one that it lies within."""
_MAX_MASKS = 50_000  # maximum number of masks decoded to be compared with their boxes


def describe_issues(file_issues: Sequence[FileIssue], where: str, verdict: Verdict = "fail") -> Iterator[Issue]:
    """Report a file's issues by field."""
    groups: dict[tuple[str, str], list[FileIssue]] = defaultdict(list)
    for file_issue in file_issues:
        groups[file_issue.part, file_issue.field].append(file_issue)
    for (part, field), group in groups.items():
        entries = [file_issue.entry for file_issue in group]
        message = f"{len(group)} in {repr(part) if part else 'the file'}: {group[0]}"
        message += f" Likewise: {enumerate_items(entries[1:])}" if entries[1:] else ""
        yield Issue(f"wrong {field}", verdict, message, where, {"issues": len(group), "entries": entries})
    if not file_issues:
        yield Issue("fields", "ok", "all fields are as COCO's format defines them", where)


@dataclass(frozen=True)
class CheckedDetectionFile:
    """A detection annotation file in COCO's format, keeping only the entries without `detection_issues`.

    Args:
        name: the file's name.
        where: the dataset's key in the config.
        images, annotations, categories: the lists in the file.
        needs_masks: whether the dataset loads masks.
        drops_bad_boxes: whether the dataset drops boxes without an area in their image.
    """

    name: str
    where: str
    images: Sequence[Mapping[str, Any]]
    annotations: Sequence[Mapping[str, Any]]
    categories: Sequence[Mapping[str, Any]]
    needs_masks: bool
    drops_bad_boxes: bool
    data: AnnotatedImages
    """The same content as a dataset, for checks of the format."""

    def command(self, *fixes: str) -> str:
        """Return the command that applies these fixes to the file."""
        source = self.data.source
        return (
            f"vitkit data convert {shlex.quote(str(source))} --images {shlex.quote(str(self.data.folder))} "
            f"--fix {' '.join(fixes)} --out {shlex.quote(str(source.with_name(source.stem + '_fixed.json')))}"
        )

    @cached_property
    def content(self) -> dict[str, Sequence[Mapping[str, Any]]]:
        """The lists in the file, by name."""
        return {"images": self.images, "annotations": self.annotations, "categories": self.categories}

    @cached_property
    def image_of(self) -> dict[int, Mapping[str, Any]]:
        """Image id -> entry of the image."""
        return {image["id"]: image for image in self.images}

    @cached_property
    def bad_boxes(self) -> dict[int, FileIssue]:
        """Boxes without an area in their image, by the index of their annotation."""
        issues = AnnotationChecks(self.content).bad_box_issues(self.content["annotations"])
        return {file_issue.position: file_issue for file_issue in issues}

    @cached_property
    def usable(self) -> list[Mapping[str, Any]]:
        """The annotations with an area in their image."""
        return [a for position, a in enumerate(self.annotations) if position not in self.bad_boxes]

    def issues(self) -> Iterator[Issue]:
        """Check all parts of the file."""
        num_crowds = sum(bool(a.get("iscrowd")) for a in self.annotations)
        counts = {"images": len(self.image_of), "objects": len(self.annotations) - num_crowds, "crowds": num_crowds}
        nouns = {"images": "images", "objects": "objects", "crowds": "crowd regions"}
        message = f"{self.name}: {', '.join(pluralize(counts[key], noun) for key, noun in nouns.items())}"
        yield Issue("annotations", "ok", message, self.where, counts)
        if num_crowds and not counts["objects"]:
            message = f"all {num_crowds} objects are crowd regions (iscrowd: 1), which are not trained on. "
            message += f"If they are single objects: {self.command('crowds')}"
            yield Issue("crowds", "fail", message, self.where, {"crowds": num_crowds})
        yield from category_issues(self.categories, self.where)
        yield from self._class_names()
        yield from self._format()
        yield from self._ids()
        yield from self._boxes()
        yield from self._duplicates()
        yield from self._masks()
        yield from self._keypoints()

    def _keypoints(self) -> Iterator[Issue]:
        """Check the keypoints, if the categories have any."""
        if not any(category.get("keypoints") for category in self.categories):
            return
        try:
            info, _ = read_keypoint_info(self.categories, self.name)
        except DataError as error:
            yield Issue("keypoints", "fail", str(error), self.where)
            return
        annotated = [a for a in self.usable if a.get("keypoints") and not a.get("iscrowd")]
        checks = AnnotationChecks(self.content)
        if wrong := checks.keypoint_issues(annotated):
            yield from describe_issues(wrong, self.where)
            lists = [a["keypoints"] for a in annotated if checks.keypoint_issues([a])]
            if any(len(values) == 3 * len(info.names) and {*values[2::3]} <= {0, 1, 2} for values in lists):
                message = "to leave out points that are no numbers or outside, and count the others: "
                yield Issue("repair of keypoints", "note", message + self.command("keypoints"), self.where)
            return
        points = np.array([a["keypoints"] for a in annotated], np.float64).reshape(-1, len(info.names), 3)
        seen, ids = points[..., 2] > 0, [a.get("id") for a in annotated]
        largest = max((value for a in annotated for value in a["bbox"]), default=0)
        if seen.any() and points[seen][:, :2].max() <= MAX_FRACTION < largest:
            message = (
                "all points are fractions of their image, but boxes are pixels. Multiply them by its width and height"
            )
            yield Issue("keypoints", "fail", message, self.where)
            return
        message = f"{seen.sum()} labeled of {pluralize(len(info.names), 'keypoints')} in {len(points)} objects"
        yield Issue("keypoints", "ok", message, self.where, {"labeled": int(seen.sum())})
        if never := [name for name, labeled in zip(info.names, seen.any(axis=0)) if not labeled]:
            verdict = "fail" if len(never) == len(info.names) else "warn"
            message = f"no object has {enumerate_items(never)} labeled (visibility 1 or 2), so it is not learned"
            yield Issue("unlabeled keypoints", verdict, message, self.where, {"names": never})
        outside = far_outside(points, np.array([a["bbox"] for a in annotated], np.float64).reshape(-1, 4)).any(axis=1)
        if outside.any():
            where = [ids[row] for row in np.flatnonzero(outside)]
            message = f"{len(where)} objects have keypoints far outside their box, such as {enumerate_items(where)}. "
            message += f"If the boxes are right, leave these points out: {self.command('keypoints')}"
            yield Issue("keypoints outside boxes", "warn", message, self.where, {"ids": where})
        if len(where := [ids[row] for row in find_swapped(points, info.flip_pairs)]):
            a, b = (info.names[point] for point in info.flip_pairs[0])
            message = f"in {len(where)} objects pairs such as {a} and {b} lie the other way round than in nearly all "
            message += f"others: {enumerate_items(where)}. Are left and right swapped there?"
            yield Issue("swapped keypoints", "warn", message, self.where, {"ids": where})

    def _class_names(self) -> Iterator[Issue]:
        groups = similar_classes(self.data)
        if groups:
            texts = [" = ".join(f"{category['name']!r} (id {category['id']})" for category in g) for g in groups]
            message = f"{pluralize(len(groups), 'classes', 'seem')} to be written in several ways: "
            message += f"{enumerate_items(texts)}. If they are one, merge them: {self.command('classes')}"
            names = [[category["name"] for category in group] for group in groups]
            yield Issue("class names", "warn", message, self.where, {"names": names})

    def _format(self) -> Iterator[Issue]:
        """Check whether the four numbers of the boxes are in the order that the format prescribes."""
        for text, fixes in format_issues(self.data):
            topic = "image sizes" if fixes == ["sizes"] else "box format"
            yield Issue(topic, "fail", f"{text}. Fix: {self.command(*fixes)}", self.where, {"fixes": fixes})

    def _ids(self) -> Iterator[Issue]:
        ids = [a["id"] for a in self.annotations if "id" in a]
        duplicates = _duplicates(ids)
        if duplicates:
            message = f"{len(duplicates)} occur twice, such as {duplicates[0]}"
            yield Issue("annotation ids", "warn", message, self.where)
        large = [id_ for id_ in ids if abs(id_) >= 2**31]
        if large:
            message = f"{len(large)} do not fit 32 bits, up to {max(large)}: other tools may truncate them; here they "
            details = {"large": len(large), "largest": max(large)}
            yield Issue("annotation ids", "note", message + "are unused", self.where, details)
        duplicates = _duplicates(image["file_name"] for image in self.images)
        if duplicates:
            message = f"{len(duplicates)} are listed twice, such as {duplicates[0]}"
            yield Issue("file names", "warn", message, self.where)

    def _boxes(self) -> Iterator[Issue]:
        outside, tiny, areas = [], [], []
        implausible: dict[tuple[float, bool], list[Any]] = defaultdict(list)
        for annotation in self.usable:
            image, id_ = self.image_of[annotation["image_id"]], annotation.get("id")
            x, y, width, height = annotation["bbox"]
            excess = max(-x, -y, x + width - image["width"], y + height - image["height"])
            if excess > BOX_TOLERANCE:
                outside.append((excess, id_))
            if not annotation.get("iscrowd"):
                areas.append(object_area(annotation))
                if "area" in annotation and not _is_plausible(annotation):
                    implausible[annotation["area"], bool(annotation.get("segmentation"))].append(id_)
                tiny += [id_] if areas[-1] < _TINY_AREA else []
        if self.bad_boxes:
            kinds = Counter(_box_issue(self.annotations[position]["bbox"]) for position in self.bad_boxes)
            counts = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
            ids = enumerate_items([self.annotations[position].get("id") for position in self.bad_boxes])
            # Bad boxes are a warning if the dataset drops them; otherwise they end a run.
            verdict = "warn" if self.drops_bad_boxes else "fail"
            hint = "they are left out" if self.drops_bad_boxes else "correct them, or drop them by bad_boxes='drop'"
            message = f"{pluralize(len(self.bad_boxes), 'boxes')} cannot be used: {counts} (annotation {ids}); {hint}"
        else:
            verdict, message = "ok", "every box has an area inside its image"
        yield Issue("degenerate boxes", verdict, message, self.where, {"boxes": len(self.bad_boxes)})
        if outside:
            largest, id_ = max(outside, key=lambda pair: pair[0])
            message = f"{pluralize(len(outside), 'boxes', 'extend', of=len(self.usable))} beyond the image, "
            message += f"at most {largest:.3g} pixels (annotation {id_}); they are clipped"
            verdict = "warn" if len(outside) > 0.01 * len(self.usable) or largest > 10 else "note"
            details = {"boxes": len(outside), "pixels": largest}
            yield Issue("boxes out of image", verdict, message, self.where, details)
        else:
            yield Issue("boxes out of image", "ok", "no box extends beyond its image", self.where, {"boxes": 0})
        if implausible:
            ids = [id_ for ids in implausible.values() for id_ in ids]
            common = max(implausible, key=lambda key: len(implausible[key]))[0]
            message = f"{pluralize(len(ids), 'objects', 'have', of=len(self.usable))} an `area` that their box "
            message += f"contradicts, such as {common:g} (annotation {enumerate_items(ids, 3)}): AP of small, medium "
            message += "and large objects goes by the box of those without a mask"
            if any(has_mask for _, has_mask in implausible):
                message += ", but by `area` of those with one: correct it, or leave it out"
            yield Issue("area fields", "warn", message, self.where, {"objects": len(ids)})
        if areas:
            message = f"areas of {min(areas):.4g} to {max(areas):.4g} pixels, median {np.median(areas):.4g}"
            message += f"; {len(tiny)} below {_TINY_AREA:g} (annotation {enumerate_items(tiny)})" if tiny else ""
            details = {"smallest": min(areas), "tiny": tiny}
            yield Issue("object sizes", "note" if tiny else "ok", message, self.where, details)

    def _duplicates(self) -> Iterator[Issue]:
        groups: dict[tuple, list] = defaultdict(list)
        for annotation in self.annotations:
            key = (annotation["image_id"], *(round(value, 1) for value in annotation["bbox"]))
            groups[key].append((annotation["category_id"], annotation.get("id")))
        same_class, other_class = [], []
        for entries in groups.values():
            num_classes = len({category for category, _ in entries})
            same_class += [entries[-1][1]] * (len(entries) - num_classes)
            other_class += [entries[-1][1]] * (num_classes - 1)
        if same_class:
            message = f"{pluralize(len(same_class), 'boxes', 'occur')} twice with one class (annotation "
            message += f"{enumerate_items(same_class)}): the copies cannot be found and count as missed"
            yield Issue("duplicate boxes", "warn", message, self.where, {"boxes": len(same_class)})
        pairs = self._overlapping_pairs()
        if pairs:
            ids = enumerate_items([f"{a} and {b}" for a, b in pairs], 3)
            message = (
                f"{pluralize(len(pairs), 'pairs')} of boxes of one class with an IoU above {_SAME_OBJECT_IOU:g}, as if "
            )
            message += f"one object were labeled twice (annotations {ids})"
            verdict: Verdict = "warn" if len(pairs) > 0.01 * len(self.annotations) else "note"
            yield Issue("duplicate boxes", verdict, message, self.where, {"overlapping_pairs": len(pairs)})
        if other_class:
            message = f"{pluralize(len(other_class), 'boxes', 'occur')} twice with different classes (annotation "
            message += f"{enumerate_items(other_class)})"
            yield Issue("duplicate boxes", "note", message, self.where, {"boxes_of_other_classes": len(other_class)})
        if not same_class and not other_class and not pairs:
            yield Issue("duplicate boxes", "ok", "no box occurs twice", self.where, {"boxes": 0})

    def _overlapping_pairs(self) -> list[tuple[Any, Any]]:
        """Return the ids of pairs of boxes that seem to label the same object, without pairs of equal boxes."""
        groups: dict[tuple, list] = defaultdict(list)
        for annotation in self.usable:
            if not annotation.get("iscrowd"):
                key = (annotation["image_id"], annotation["category_id"])
                groups[key].append((annotation["bbox"], annotation.get("id")))
        pairs = []
        for entries in groups.values():
            boxes = torch.tensor([box for box, _ in entries], dtype=torch.float64)
            boxes_xyxy = box_convert(boxes, "xywh", "xyxy")
            overlaps = box_iou(boxes_xyxy, boxes_xyxy).triu(diagonal=1)
            for i, j in (overlaps > _SAME_OBJECT_IOU).nonzero().tolist():
                if [round(v, 1) for v in entries[i][0]] != [round(v, 1) for v in entries[j][0]]:
                    pairs.append((entries[i][1], entries[j][1]))
        return pairs

    def _masks(self) -> Iterator[Issue]:
        with_mask = [a for a in self.usable if a.get("segmentation") not in (None, [])]
        severity: Verdict = "fail" if self.needs_masks else "warn"
        if not with_mask:
            verdict: Verdict = "note" if not self.needs_masks else "fail" if self.usable else "ok"
            message = "no annotation has a segmentation: boxes only"
            yield Issue("masks", verdict, message, self.where, {"masks": 0})
            return
        different, misplaced, max_distance, kinds = [], [], 0.0, Counter()
        nested: list[Any] = []
        file_issues = segmentation_issues({**self.content, "annotations": with_mask}, required=False)
        wrong = {file_issue.position for file_issue in file_issues}
        step = -(-len(with_mask) // _MAX_MASKS)
        for position, annotation in enumerate(with_mask):
            if position in wrong:
                continue
            segmentation, box = annotation["segmentation"], annotation["bbox"]
            image = self.image_of[annotation["image_id"]]
            kinds[_kind(segmentation)] += 1
            if kinds.total() % step:
                continue
            if isinstance(segmentation, list) and _is_nested(segmentation, image["height"], image["width"]):
                nested.append(annotation.get("id"))
            extent = coco_mask.toBbox(encode_segmentation(segmentation, image["height"], image["width"]))
            edges, box_edges = ((x, y, x + width, y + height) for x, y, width, height in (extent.tolist(), box))
            distance = max(abs(a - b) for a, b in zip(edges, box_edges))
            if distance > _MASK_TOLERANCE:
                different.append(annotation.get("id"))
                max_distance = max(max_distance, distance)
            if coco_mask.iou(extent[None], np.array([box], np.float64), [0]) < _MIN_MASK_IOU:
                misplaced.append(annotation.get("id"))
        num_missing = len(self.usable) - len(with_mask)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        message = f"{pluralize(len(with_mask), 'masks')}: {counts}"
        message += f"; {pluralize(num_missing, 'annotations', 'have')} none" if num_missing else ""
        details = {"masks": len(with_mask), "lacking": num_missing, **kinds}
        yield Issue("masks", severity if num_missing else "ok", message, self.where, details)
        if file_issues:
            yield from describe_issues(file_issues, self.where, severity)
        if nested:
            message = f"{pluralize(len(nested), 'masks', 'have')} a polygon within another one, as a hole is drawn "
            message += f"(annotation {enumerate_items(nested)}), but COCO's masks are the union of their polygons: "
            message += "write masks with holes as run lengths"
            yield Issue("nested polygons", "note", message, self.where, {"masks": len(nested)})
        if misplaced:
            message = (
                f"{pluralize(len(misplaced), 'masks', 'lie')} elsewhere than the box (IoU below {_MIN_MASK_IOU:g}): "
            )
            message += f"annotation {enumerate_items(misplaced)}"
            yield Issue("masks against boxes", severity, message, self.where)
        if different:
            fraction = percent(len(different), len(with_mask))
            message = f"{pluralize(len(different), 'masks', 'differ', of=len(with_mask))} ({fraction}) by over "
            message += f"{_MASK_TOLERANCE:g} pixels from the box, at most {max_distance:.3g} pixels "
            message += f"(annotation {enumerate_items(different, 3)})"
            verdict = "warn" if len(different) > 0.1 * len(with_mask) else "note"
            details = {"masks": len(different), "pixels": max_distance}
            yield Issue("masks against boxes", verdict, message, self.where, details)
        elif not misplaced:
            message = f"masks and boxes agree within {_MASK_TOLERANCE:g} pixels"
            yield Issue("masks against boxes", "ok", message, self.where, {"masks": 0})


def category_issues(categories: Sequence[Mapping[str, Any]], where: str) -> Iterator[Issue]:
    """Check the names and ids of categories."""
    duplicates = _duplicates(category["name"] for category in categories)
    if duplicates:
        message = f"several categories are named {enumerate_items(duplicates)}"
        yield Issue("class names", "warn", message, where, {"names": duplicates})
    ids = sorted(category["id"] for category in categories)
    if not ids:
        return
    num_gaps = ids[-1] - ids[0] + 1 - len(set(ids))
    message = f"{pluralize(len(ids), 'classes')}, category ids {ids[0]} to {ids[-1]}"
    if num_gaps:
        message += f" with {pluralize(num_gaps, 'gaps')} (mapped to 0 to {len(ids) - 1} without them; "
        message += "results are written in raw ids)"
    details = {"classes": len(ids), "gaps": num_gaps}
    yield Issue("category ids", "note" if num_gaps else "ok", message, where, details)


def _duplicates(values: Iterable[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]


def _is_plausible(annotation: Mapping[str, Any]) -> bool:
    """Return whether the area of an object is not larger than its box, nor a placeholder such as 0 or 1."""
    (_, _, width, height), area = annotation["bbox"], annotation["area"]
    return (area > 1 or width * height < _LARGE_BOX) and area <= (width + 2) * (height + 2)


def _box_issue(bbox: Sequence[float]) -> str:
    return "no width or height" if min(bbox[2:]) <= 0 else "outside the image"


def _kind(segmentation: Any) -> str:
    if isinstance(segmentation, list):
        return "polygons in several parts" if len(segmentation) > 1 else "polygons"
    return "uncompressed run lengths" if isinstance(segmentation["counts"], list) else "compressed run lengths"


def _is_nested(polygons: Sequence[Sequence[float]], height: int, width: int) -> bool:
    """Return whether a polygon lies within another, larger one."""
    if len(polygons) < 2:
        return False
    masks = [encode_segmentation([polygon], height, width) for polygon in polygons]
    # The overlap with a crowd is relative to the area of the first mask.
    within = coco_mask.iou(masks, masks, [1] * len(masks)) > _MIN_WITHIN
    return bool((within & ~within.T).any())


def describe_panoptic(
    entries: Sequence[Mapping[str, Any]], categories: Sequence[Mapping[str, Any]], name: str, where: str
) -> Iterator[Issue]:
    """Check the segments of a panoptic file.

    Args:
        entries: entries of `annotations`, one for each image.
        categories, name: the file's categories and name.
    """
    segments = [segment for entry in entries for segment in entry["segments_info"]]
    thing_ids = {category["id"] for category in categories if category["isthing"]}
    present = {segment["category_id"] for segment in segments}
    counts = {
        "images": len(entries),
        "segments": len(segments),
        "things": sum(segment["category_id"] in thing_ids for segment in segments),
        "crowds": sum(bool(segment.get("iscrowd")) for segment in segments),
    }
    message = f"{name}: {pluralize(counts['images'], 'images')}, {pluralize(counts['segments'], 'segments')}, "
    message += f"{counts['things']} of them of things, {pluralize(counts['crowds'], 'crowds')}; "
    message += f"{len(present & thing_ids)} of {len(thing_ids)} thing classes and "
    message += f"{len(present - thing_ids)} of {len(categories) - len(thing_ids)} stuff classes occur"
    yield Issue("annotations", "ok", message, where, counts)
    yield from category_issues(categories, where)
    without_things = [
        entry["image_id"] for entry in entries if not any(s["category_id"] in thing_ids for s in entry["segments_info"])
    ]
    if without_things:
        message = f"{pluralize(len(without_things), 'images', 'show')} stuff only: {enumerate_items(without_things)}"
        yield Issue("images without things", "note", message, where, {"images": without_things})
    measured = [segment for segment in segments if "area" in segment]
    areas = [segment["area"] for segment in measured if not segment.get("iscrowd")]
    if areas:
        thing_areas = [segment["area"] for segment in measured if segment["category_id"] in thing_ids]
        num_tiny = sum(area < _TINY_AREA for area in areas)
        message = f"segments of {min(areas):g} to {max(areas):g} pixels, things from {min(thing_areas, default=0):g}"
        message += f"; {num_tiny} below {_TINY_AREA:g}"
        details = {"smallest": min(areas), "tiny": num_tiny}
        yield Issue("object sizes", "note" if num_tiny else "ok", message, where, details)


def find_swapped(points: np.ndarray, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the rows of objects of which most pairs of points lie the other way round than in nearly all objects.

    Args:
        points: (N, K, 3) x, y, visibility.
        pairs: the points that a mirrored image exchanges.
    """
    if not pairs:
        return np.zeros(0, np.int64)
    a, b = np.array(pairs).T
    order = np.sign(points[:, a, 0] - points[:, b, 0]) * ((points[:, a, 2] > 0) & (points[:, b, 2] > 0))
    sides = np.sign(order.sum(axis=1))
    counts = (sides < 0).sum(), (sides > 0).sum()
    if max(counts) < _MIN_ALIKE or min(counts) > _MAX_SWAPPED * sum(counts):
        return np.zeros(0, np.int64)
    return np.flatnonzero(sides == (1 if counts[0] > counts[1] else -1))
