"""A single pass over a dataset's images: which are readable, which are duplicates, and what label maps contain."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vitkit.apps.datasets.image_groups import thumbnail
from vitkit.apps.doctor.issues import Issue, enumerate_items, percent
from vitkit.apps.doctor.statistics import DatasetStatistics
from vitkit.errors import DataError
from vitkit.io.channel_files import as_rgb
from vitkit.io.image_files import MAX_PIXELS, is_rotated, read_header
from vitkit.ops.label_maps import count_values
from vitkit.ops.masks import boxes_around_masks
from vitkit.structures import IGNORE_INDEX
from vitkit.text_format import pluralize


@dataclass
class ImageScan:
    """The results of a pass over images."""

    num_scanned: int = 0
    num_images: int = 0
    errors: list[str] = field(default_factory=list)
    readable: list[int] = field(default_factory=list)
    """Indices of the images that can be read; entry i of the next four lists belongs to readable[i]."""
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """(height, width) of each image, in pixels."""
    checksums: list[bytes] = field(default_factory=list)
    """Checksum of each image's pixels."""
    thumbnails: list[np.ndarray] = field(default_factory=list)
    """Thumbnail of each image, (256,) uint8 gray values."""
    modes: list[str] = field(default_factory=list)
    """Pillow's name for each image's color format; empty for synthetic images."""
    num_rotated: int = 0
    """Number of images that their EXIF tag rotates."""
    pixel_moments: list[np.ndarray] = field(default_factory=list)
    """(2, C) mean of each image's values and of their squares, in 0..1, by channel; empty for RGB of 8 bits."""
    label_pixels: Counter[int] = field(default_factory=Counter)
    """Label -> number of pixels in all maps; 255 for none."""
    num_classes: list[int] = field(default_factory=list)
    """Number of classes in each semantic map."""
    map_errors: list[str] = field(default_factory=list)

    @property
    def extent(self) -> str:
        """The number of scanned images in words, for messages; "" if all were scanned."""
        return (
            ""
            if self.num_scanned == self.num_images
            else f" (of {self.num_scanned} checked, {self.num_images} in total)"
        )


def scan_images(statistics: DatasetStatistics, max_images: int) -> ImageScan:
    """Load images that are evenly spread over the dataset."""
    dataset = statistics.dataset
    scan = ImageScan(num_images=len(statistics.image_ids))
    if not statistics.has_images:
        return scan
    indices = np.unique(np.linspace(0, scan.num_images - 1, min(max_images, scan.num_images)).astype(int)).tolist()
    scan.num_scanned = len(indices)
    for index in indices:
        try:
            image = dataset.load_image(index)
        except DataError as error:
            scan.errors.append(str(error))
            continue
        scan.readable.append(index)
        scan.sizes.append(image.shape[:2])
        scan.checksums.append(hashlib.blake2b(image.tobytes(), digest_size=16).digest() + repr(image.shape).encode())
        scan.thumbnails.append(thumbnail(as_rgb(image)))
        if image.dtype == np.uint16:
            values = image.reshape(-1, image.shape[2]) / 65535
            scan.pixel_moments.append(np.stack([values.mean(axis=0), (values**2).mean(axis=0)]))
        elif statistics.files is not None:
            limit = {"max_pixels": dataset.max_image_pixels or MAX_PIXELS}
            scan.modes.append(read_header(statistics.files[index], **limit).mode)
            scan.num_rotated += is_rotated(statistics.files[index], **limit)
        try:
            if "panoptic" in dataset.annotations:
                _scan_panoptic_map(statistics, index, scan)
            elif "semantic" in dataset.annotations:
                _scan_label_map(statistics, index, scan)
        except DataError as error:
            scan.map_errors.append(str(error))
    return scan


def _scan_label_map(statistics: DatasetStatistics, index: int, scan: ImageScan) -> None:
    labels = statistics.dataset.load_semantic(index)
    counts = dict(zip(*(column.tolist() for column in count_values(labels))))
    scan.label_pixels.update(counts)
    scan.num_classes.append(len(counts.keys() - {IGNORE_INDEX}))
    if labels.shape != scan.sizes[-1]:
        (height, width), (image_height, image_width) = labels.shape, scan.sizes[-1]
        scan.map_errors.append(
            f"image {statistics.image_ids[index]} is {image_width}x{image_height} pixels (width x height), its label "
            f"image {width}x{height}"
        )


def _scan_panoptic_map(statistics: DatasetStatistics, index: int, scan: ImageScan) -> None:
    ids, segments = statistics.dataset.load_panoptic(index)
    labels = {segment["id"]: segment["label"] for segment in segments}
    areas = dict(zip(*(column.tolist() for column in count_values(ids))))
    for id_, pixels in areas.items():
        scan.label_pixels[labels.get(id_, IGNORE_INDEX)] += pixels
    for segment in statistics.listed_segments[index] if statistics.listed_segments else ():
        if segment["id"] in areas:
            where = f"image {statistics.image_ids[index]}: segment {segment['id']}"
            scan.map_errors += [f"{where} {error}" for error in _segment_errors(segment, ids, areas[segment["id"]])]


def _segment_errors(segment: Mapping[str, Any], ids: np.ndarray, area: int) -> Iterator[str]:
    """Compare the area and box of a segment listed in the JSON with its map."""
    if segment.get("area", area) != area:
        yield f"has area {segment['area']} in the JSON and {area} pixels in the map"
    if "bbox" in segment:
        x0, y0, x1, y1 = boxes_around_masks(torch.from_numpy(ids == segment["id"])[None])[0].tolist()
        if [x0, y0, x1 - x0, y1 - y0] != segment["bbox"]:
            yield f"has bbox {segment['bbox']} in the JSON and {[x0, y0, x1 - x0, y1 - y0]} in the map"


def image_issues(statistics: DatasetStatistics, scan: ImageScan) -> Iterator[Issue]:
    """Report unreadable and repeated images, color formats and sizes."""
    where = statistics.where
    if scan.errors:
        message = f"{pluralize(len(scan.errors), 'images', of=scan.num_scanned)} cannot be read: {scan.errors[0]}"
        yield Issue("images", "fail", message, where, {"images": len(scan.errors)})
    if not scan.readable:
        return
    heights, widths = np.array(scan.sizes).T
    message = f"{pluralize(len(scan.readable), 'images')} read{scan.extent}: "
    message += f"{widths.min()}x{heights.min()} to {widths.max()}x{heights.max()} pixels (width x height)"
    num_sizes = len(set(scan.sizes))
    if num_sizes > 1:
        message += f", median longer side {np.median(np.maximum(heights, widths)):g}"
    yield Issue("images", "ok", message, where, {"images": len(scan.readable), "sizes": num_sizes})
    other_modes = Counter(mode for mode in scan.modes if mode != "RGB")
    if other_modes:
        names = {"L": "gray", "P": "palette", "RGBA": "with alpha", "CMYK": "CMYK"}
        text = ", ".join(f"{count} {names.get(mode, mode)}" for mode, count in other_modes.items())
        files = [statistics.files[k].name for k, mode in zip(scan.readable, scan.modes) if mode != "RGB"]
        message = f"{text}: read as RGB of 8 bits ({enumerate_items(files, 3)}); data.channels=N reads them as stored"
        yield Issue("color formats", "note", message, where, dict(other_modes))
    if scan.pixel_moments:
        mean, squares = np.mean(scan.pixel_moments, axis=0)
        std = np.sqrt(np.maximum(squares - mean**2, 0))
        std[std < 1 / 65535] = 1  # a constant channel, such as opaque alpha, apart from rounding errors
        lists = ["[" + ",".join(f"{value:.4g}" for value in values) + "]" for values in (mean, std)]
        message = f"model.backbone.pixel_mean={lists[0]} model.backbone.pixel_std={lists[1]}"
        yield Issue("pixel statistics", "ok", message, where, {"mean": mean.tolist(), "std": std.tolist()})
    if scan.num_rotated:
        message = f"{pluralize(scan.num_rotated, 'images', 'are')} rotated by the EXIF tag and read upright"
        yield Issue("rotated images", "note", message, where, {"images": scan.num_rotated})
    counts = Counter(scan.checksums)
    duplicates = [statistics.image_ids[k] for k, checksum in zip(scan.readable, scan.checksums) if counts[checksum] > 1]
    if duplicates:
        message = (
            f"{pluralize(len(duplicates), 'images', 'have')} the pixels of another one: {enumerate_items(duplicates)}"
        )
        yield Issue("repeated images", "warn", message, where, {"images": len(duplicates)})


def map_issues(statistics: DatasetStatistics, scan: ImageScan) -> Iterator[Issue]:
    """Report invalid label maps, and the fraction of pixels in each class."""
    where, semantic = statistics.where, statistics.kind == "semantic"
    total = sum(scan.label_pixels.values())
    if scan.map_errors:
        message = f"{pluralize(len(scan.map_errors), 'maps', 'are')} wrong: {scan.map_errors[0]}"
        yield Issue("maps", "fail", message, where, {"maps": len(scan.map_errors)})
    elif total:
        segments = "every map fits its image and its list of segments"
        message = "every label image fits its image and has known values only" if semantic else segments
        yield Issue("maps", "ok", message + scan.extent, where)
    if not total or statistics.kind == "instance":
        return
    void = scan.label_pixels[IGNORE_INDEX]
    message = f"{percent(void, total)} of the pixels are of no class and ignored"
    yield Issue("void", "warn" if void > 0.5 * total else "note", message, where, {"part": void / total})
    pixels = sorted(((scan.label_pixels[k], name) for k, name in enumerate(statistics.classes)), reverse=True)
    present = [(count, name) for count, name in pixels if count]
    shown = present if len(present) <= 16 else [*present[:8], *present[-4:]]
    message = f"pixels of {pluralize(len(present), 'classes', of=len(statistics.classes))}: "
    message += ", ".join(f"{name} {percent(count, total)}" for count, name in shown)
    message += "" if shown is present else " (largest and smallest)"
    verdict = "note" if present and present[-1][0] < 0.01 * total else "ok"
    yield Issue("pixels of classes", verdict, message, where, {name: count / total for count, name in pixels})
