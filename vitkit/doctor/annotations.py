"""Faults of annotation files, all of them: of COCO's boxes and masks, and of panoptic segments."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pycocotools import mask as coco_mask

from vitkit.data.coco_file import box_fault, is_well_formed_box, segmentation_fault
from vitkit.doctor.findings import Finding, Verdict, percent, some
from vitkit.ops.boxes import box_iou

_STICKS_OUT = 0.01  # pixels, as `CocoDetection` counts
_MASK_TOLERANCE = 2.0
"""Pixels by which a mask's extent may differ from its box: annotation tools round both."""
_LEAST_OVERLAP = 0.5  # IoU of a mask's extent and its box; below it one of them is wrong
_TINY = 16.0  # pixels of area, 4 x 4
_SAME_OBJECT = 0.8
"""IoU from which two boxes of one class are taken for one object that is labelled twice."""
_MOST_MASKS = 50_000  # drawn, to compare them with their boxes


def detection_findings(
    parts: Mapping[str, list[dict]], file_name: str, where: str, *, masks: bool, drop: bool
) -> Iterator[Finding]:
    """
    Args:
        parts: `images`, `annotations` and `categories` of the file, as they are.
        masks, drop: whether the dataset loads masks, and drops bad boxes.
    """
    images = {image.get("id"): image for image in parts["images"]}
    known = {category.get("id") for category in parts["categories"]}
    annotations = parts["annotations"]
    crowds = [a for a in annotations if a.get("iscrowd")]
    yield Finding(
        "annotations", "ok",
        f"{file_name}: {len(images)} images, {len(annotations) - len(crowds)} objects, {len(crowds)} crowd regions",
        where, {"images": len(images), "objects": len(annotations) - len(crowds), "crowds": len(crowds)},
    )  # fmt: skip
    yield from _categories(parts["categories"], where)
    yield from _references(annotations, images, known, where)
    yield from _ids(parts, where)
    placed = [a for a in annotations if _known(a.get("image_id"), images)]
    yield from _boxes(placed, images, where, drop=drop)
    yield from _duplicates(placed, where)
    yield from _masks(placed, images, where, needed=masks)


def _known(value: Any, known: Any) -> bool:
    return isinstance(value, int) and value in known


def _categories(categories: Sequence[Mapping[str, Any]], where: str) -> Iterator[Finding]:
    ids = sorted(c["id"] for c in categories if isinstance(c.get("id"), int))
    names = Counter(str(c.get("name")) for c in categories)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        yield Finding("class names", "warn", f"several categories are named {some(twice)}", where, {"names": twice})
    if not ids:
        return
    gaps = ids[-1] - ids[0] + 1 - len(set(ids))
    message = f"{len(ids)} classes, category ids {ids[0]} to {ids[-1]}"
    if gaps:
        message += f" with {gaps} gaps (mapped to 0 to {len(ids) - 1} without them; results are written in raw ids)"
    yield Finding("category ids", "note" if gaps else "ok", message, where, {"classes": len(ids), "gaps": gaps})


def _references(
    annotations: Sequence[Mapping[str, Any]], images: Mapping[Any, Any], categories: set, where: str
) -> Iterator[Finding]:
    for key, known, part in (("category_id", categories, "categories"), ("image_id", images, "images")):
        unknown = [a.get(key) for a in annotations if not _known(a.get(key), known)]
        check = "unknown categories" if key == "category_id" else "unknown images"
        if unknown:
            values = some(sorted({repr(value) for value in unknown}))
            message = f"{len(unknown)} annotations have a {key} that is not in '{part}': {values}"
            yield Finding(check, "fail", message, where, {"annotations": len(unknown)})
        else:
            yield Finding(check, "ok", f"every {key} is in '{part}'", where)


def _ids(parts: Mapping[str, Sequence[Mapping[str, Any]]], where: str) -> Iterator[Finding]:
    for part, check in (("images", "image ids"), ("annotations", "annotation ids"), ("categories", "category ids")):
        ids = [json.dumps(entry.get("id")) for entry in parts[part] if "id" in entry]
        twice = [value for value, count in Counter(ids).items() if count > 1]
        if twice:
            verdict: Verdict = "warn" if part == "annotations" else "fail"
            yield Finding(check, verdict, f"{len(twice)} are there twice, such as {twice[0]}", where)
    large = [a["id"] for a in parts["annotations"] if isinstance(a.get("id"), int) and abs(a["id"]) >= 2**31]
    if large:
        message = f"{len(large)} do not fit 32 bits, up to {max(large)}: other tools may cut them; here they are unused"
        yield Finding("annotation ids", "note", message, where, {"large": len(large), "largest": max(large)})
    names = Counter(str(image.get("file_name")) for image in parts["images"])
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        yield Finding("file names", "warn", f"{len(twice)} are listed twice, such as {twice[0]}", where)


def _boxes(
    annotations: Sequence[Mapping[str, Any]], images: Mapping[Any, Mapping[str, Any]], where: str, *, drop: bool
) -> Iterator[Finding]:
    faults: dict[str, list] = defaultdict(list)
    outside, tiny, areas = [], [], []
    for annotation in annotations:
        box, image = annotation.get("bbox"), images[annotation["image_id"]]
        if not all(isinstance(image.get(side), int) for side in ("width", "height")):
            continue  # the dataset says so when it is built
        fault = _fault(box, image)
        if fault is not None:
            # What can be dropped is a warning where it is dropped, and ends a run where it is not.
            faults["fail" if not (drop and is_well_formed_box(box)) else "warn"].append((annotation.get("id"), fault))
            continue
        x, y, width, height = box
        beyond = max(-x, -y, x + width - image["width"], y + height - image["height"])
        if beyond > _STICKS_OUT:
            outside.append((beyond, annotation.get("id")))
        if not annotation.get("iscrowd"):
            area = annotation.get("area")
            areas.append(area if isinstance(area, int | float) and area > 0 else width * height)
            tiny += [annotation.get("id")] if areas[-1] < _TINY else []
    for verdict, found in faults.items():
        kinds = Counter(fault for _, fault in found)
        message = f"{len(found)} boxes are wrong: " + some([f"{count} x {fault}" for fault, count in kinds.items()])
        message += f" (annotation {some([number for number, _ in found])})"
        hint = "; they are left out" if verdict == "warn" else "; correct them, or bad_boxes='drop' for empty ones"
        yield Finding("degenerate boxes", verdict, message + hint, where, {"boxes": len(found)})
    if not faults:
        yield Finding("degenerate boxes", "ok", "every box has an area inside its image", where, {"boxes": 0})
    if outside:
        farthest, number = max(outside, key=lambda pair: pair[0])
        message = f"{len(outside)} of {len(annotations)} boxes reach out of their image, at most {farthest:.3g} pixels "
        message += f"(annotation {number}); they are clipped"
        verdict = "warn" if len(outside) > 0.01 * len(annotations) or farthest > 10 else "note"
        yield Finding("boxes out of image", verdict, message, where, {"boxes": len(outside), "pixels": farthest})
    else:
        yield Finding("boxes out of image", "ok", "no box reaches out of its image", where, {"boxes": 0})
    if areas:
        message = f"areas of {min(areas):.4g} to {max(areas):.4g} pixels, {np.median(areas):.4g} in the middle"
        message += f"; {len(tiny)} below {_TINY:g} (annotation {some(tiny)})" if tiny else ""
        yield Finding("object sizes", "note" if tiny else "ok", message, where, {"smallest": min(areas), "tiny": tiny})


def _fault(box: Any, image: Mapping[str, Any]) -> str | None:
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(v, int | float) for v in box):
        return "not four numbers"
    fault = box_fault(box, image)
    if fault and fault.startswith("it lies outside"):
        return "outside the image"
    if fault and all(map(math.isfinite, box)):
        return "negative width or height" if min(box[2:]) < 0 else "no width or height"
    return fault and "not finite"


def _duplicates(annotations: Sequence[Mapping[str, Any]], where: str) -> Iterator[Finding]:
    seen: dict[tuple, list] = defaultdict(list)
    for annotation in annotations:
        box = annotation.get("bbox")
        if isinstance(box, list) and len(box) == 4 and all(isinstance(v, int | float) for v in box):
            key = (annotation["image_id"], *(round(float(v), 1) if math.isfinite(v) else str(v) for v in box))
            seen[key].append((annotation.get("category_id"), annotation.get("id")))
    same, other = [], []
    for entries in seen.values():
        counts = Counter(category for category, _ in entries)
        same += [entries[-1][1]] * (len(entries) - len(counts))
        other += [entries[-1][1]] * (len(counts) - 1)
    if same:
        message = f"{len(same)} boxes are there twice with one class (annotation {some(same)}): the copies cannot be "
        yield Finding("duplicate boxes", "warn", message + "found and count as missed", where, {"boxes": len(same)})
    near = _overlapping(annotations)
    if near:
        message = (
            f"{len(near)} pairs of boxes of one class overlap with an IoU above {_SAME_OBJECT:g}, as if one object "
        )
        message += f"were labelled twice (annotations {some([f'{a} and {b}' for a, b in near], 3)})"
        verdict: Verdict = "warn" if len(near) > 0.01 * len(annotations) else "note"
        yield Finding("duplicate boxes", verdict, message, where, {"overlapping_pairs": len(near)})
    if other:
        message = f"{len(other)} boxes are there twice with different classes (annotation {some(other)})"
        yield Finding("duplicate boxes", "note", message, where, {"boxes_of_other_classes": len(other)})
    if not same and not other and not near:
        yield Finding("duplicate boxes", "ok", "no box is there twice", where, {"boxes": 0})


def _overlapping(annotations: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """Ids of pairs that seem to be one object of one image, but for those with one box."""
    groups: dict[tuple, list] = defaultdict(list)
    for annotation in annotations:
        box = annotation.get("bbox")
        if _fault(box, {"width": math.inf, "height": math.inf}) is None and not annotation.get("iscrowd"):
            groups[annotation["image_id"], str(annotation.get("category_id"))].append((box, annotation.get("id")))
    pairs = []
    for entries in groups.values():
        boxes = torch.tensor([box for box, _ in entries], dtype=torch.float64)
        boxes_xyxy = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1)
        overlaps = box_iou(boxes_xyxy[:, None], boxes_xyxy).triu(diagonal=1)
        for i, j in (overlaps > _SAME_OBJECT).nonzero().tolist():
            if [round(v, 1) for v in entries[i][0]] != [round(v, 1) for v in entries[j][0]]:
                pairs.append((entries[i][1], entries[j][1]))
    return pairs


def _masks(
    annotations: Sequence[Mapping[str, Any]], images: Mapping[Any, Mapping[str, Any]], where: str, *, needed: bool
) -> Iterator[Finding]:
    with_mask = [a for a in annotations if a.get("segmentation")]
    if not with_mask:
        verdict: Verdict = "fail" if needed and annotations else "note" if not needed else "ok"
        yield Finding("masks", verdict, "no annotation has a segmentation: boxes only", where, {"masks": 0})
        return
    faults, differing, wrong, farthest, kinds = [], [], [], 0.0, Counter()
    step, number = -(-len(with_mask) // _MOST_MASKS), 0
    for annotation in with_mask:
        segmentation, image = annotation["segmentation"], images[annotation["image_id"]]
        fault = segmentation_fault(segmentation, image)
        if fault:
            faults.append((annotation.get("id"), fault))
            continue
        kinds[_kind(segmentation)] += 1
        box = annotation.get("bbox")
        if (number := number + 1) % step or _fault(box, image) is not None:
            continue
        x, y, width, height = _extent(segmentation, image)
        sides = zip((x, y, x + width, y + height), (box[0], box[1], box[0] + box[2], box[1] + box[3]))
        distance = max(abs(a - b) for a, b in sides)
        if distance > _MASK_TOLERANCE:
            differing.append(annotation.get("id"))
            farthest = max(farthest, distance)
        if _overlap((x, y, width, height), box) < _LEAST_OVERLAP:
            wrong.append(annotation.get("id"))
    lacking = len(annotations) - len(with_mask)
    message = f"{len(with_mask)} masks: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}"
    message += f"; {lacking} annotations have none" if lacking else ""
    details = {"masks": len(with_mask), "lacking": lacking, **kinds}
    yield Finding("masks", "fail" if lacking and needed else "warn" if lacking else "ok", message, where, details)
    if faults:
        message = f"{len(faults)} masks are wrong, such as that of annotation {faults[0][0]}: {faults[0][1]}"
        yield Finding("wrong masks", "fail" if needed else "warn", message, where, {"masks": len(faults)})
    if wrong:
        message = f"{len(wrong)} masks lie elsewhere than their boxes (IoU below {_LEAST_OVERLAP:g}): annotation "
        yield Finding("masks against boxes", "fail" if needed else "warn", message + some(wrong), where)
    if differing:
        share = percent(len(differing), len(with_mask))
        message = f"{len(differing)} of {len(with_mask)} masks ({share}) reach over {_MASK_TOLERANCE:g} pixels beyond "
        message += f"or short of their boxes, at most {farthest:.3g} pixels (annotation {some(differing, 3)})"
        verdict = "warn" if len(differing) > 0.1 * len(with_mask) else "note"
        yield Finding("masks against boxes", verdict, message, where, {"masks": len(differing), "pixels": farthest})
    elif not wrong:
        message = f"masks and boxes agree within {_MASK_TOLERANCE:g} pixels"
        yield Finding("masks against boxes", "ok", message, where, {"masks": 0})


def _kind(segmentation: Any) -> str:
    if isinstance(segmentation, list):
        return "polygons in several parts" if len(segmentation) > 1 else "polygons"
    return "uncompressed run lengths" if isinstance(segmentation["counts"], list) else "compressed run lengths"


def _extent(segmentation: Any, image: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """xywh in pixels of a mask as it is drawn."""
    size = image["height"], image["width"]
    if isinstance(segmentation, list):
        segmentation = coco_mask.merge(coco_mask.frPyObjects(segmentation, *size))
    elif isinstance(segmentation["counts"], list):
        segmentation = coco_mask.frPyObjects(segmentation, *size)
    x, y, width, height = coco_mask.toBbox(segmentation).tolist()
    return x, y, width, height


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """IoU of two boxes xywh."""
    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    inside = max(width, 0) * max(height, 0)
    union = a[2] * a[3] + b[2] * b[3] - inside
    return inside / union if union > 0 else 0.0


def panoptic_findings(
    dataset: Any, entries: Sequence[Mapping[str, Any]], categories: Sequence[Mapping[str, Any]], name: str, where: str
) -> Iterator[Finding]:
    """
    Args:
        dataset: built.
        entries: of `annotations`, one for each image.
        categories, name: of the file.
    """
    segments = [segment for entry in entries for segment in entry["segments_info"]]
    crowds = sum(bool(segment.get("iscrowd")) for segment in segments)
    things = {c["id"] for c in categories if c["isthing"]}
    of_things = sum(segment["category_id"] in things for segment in segments)
    present = {segment["category_id"] for segment in segments}
    message = (
        f"{name}: {len(entries)} images, {len(segments)} segments, {of_things} of them of things, {crowds} crowds; "
    )
    message += f"{len(present & things)} of {len(things)} thing classes and {len(present - things)} of "
    message += f"{len(categories) - len(things)} stuff classes are there"
    counts = {"images": len(entries), "segments": len(segments), "things": of_things, "crowds": crowds}
    yield Finding("annotations", "ok", message, where, counts)
    yield from _categories(categories, where)
    without_things = [
        entry["image_id"] for entry in entries if not any(s["category_id"] in things for s in entry["segments_info"])
    ]
    if without_things:
        message = f"{len(without_things)} images show stuff only: {some(without_things)}"
        yield Finding("images without things", "note", message, where, {"images": without_things})
    areas = [(s["area"], s["id"]) for s in segments if isinstance(s.get("area"), int | float) and not s.get("iscrowd")]
    if areas:
        least = min(area for area, _ in areas)
        tiny = sum(area < _TINY for area, _ in areas)
        of_things = [
            s["area"] for s in segments if isinstance(s.get("area"), int | float) and s["category_id"] in things
        ]
        message = (
            f"segments of {least:g} to {max(a for a, _ in areas):g} pixels, things from {min(of_things, default=0):g}"
        )
        message += f"; {tiny} below {_TINY:g}"
        yield Finding("object sizes", "note" if tiny else "ok", message, where, {"smallest": least, "tiny": tiny})
