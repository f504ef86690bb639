"""Videos with one class each: lists like those of Kinetics and Something-Something, and folders named after classes."""

import logging
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitkit.data.datasets.base import require_folders
from vitkit.data.datasets.clip_sampling import ClipSampling, OnShort
from vitkit.data.datasets.image_folder import (
    ClassificationDataset,
    ListedFiles,
    list_class_folders,
    warn_of_empty_classes,
)
from vitkit.data.transforms.annotated_image import AnnotatedImage, Transforms
from vitkit.errors import DataError
from vitkit.io.folders import IMAGE_SUFFIXES, is_hidden, is_output
from vitkit.io.image_files import check_inside, to_tensor
from vitkit.io.json_files import read_json
from vitkit.io.text_files import read_lines
from vitkit.io.video_files import VIDEO_EXTENSIONS, Video, open_video
from vitkit.registry import DATASETS, Spec, nearest
from vitkit.structures import Sample
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")
OnMissing = Literal["raise", "skip"]
_NUMBER = re.compile("[0-9]{1,5}")  # without a class_file, the largest label sets the number of classes


class ClipDataset(ClassificationDataset):
    """Base of datasets of videos with one class each. A subclass sets `image_ids` and implements `open` and `label`.

    A sample's image is a clip, (3, T, H, W). With several clips of a video, or several crops of each, it is (views, 3,
    T, H, W), with the crops of the first clip first; `collate` makes each view a sample of the batch, with the target
    of the video, and the evaluator averages their scores. Targets are those of `ClassificationDataset` with
    `is_padded`, which tells whether the last frame is repeated because the video is shorter than a clip.

    Args:
        classes: see `ClassificationDataset`.
        transforms: image transforms; all frames of a video get the same random numbers, and so the same crop and
            colors. Transforms with `views`, such as `ClipEvalTransforms`, give several crops.
        sampling: how frames are chosen for a clip.
    """

    noun = "videos"
    is_video = True
    recommended_transforms = "ClipTrainTransforms or ClipEvalTransforms"

    def __init__(self, classes: Sequence[str], transforms: Spec | Transforms | None, sampling: ClipSampling):
        super().__init__(classes, transforms)
        self.sampling = sampling

    def open(self, index: int) -> Video:
        """Open a video; `index` is in range."""
        raise NotImplementedError

    def label(self, index: int) -> int:
        """Return the class of a video, as an index into `classes`."""
        raise NotImplementedError

    def load_sample(self, index: int, seed: int | None) -> Sample:
        """Load the clips of a video.

        Raises:
            DataError: the video cannot be read or is too short, or its size after the transforms differs from that of
                earlier videos.
        """
        random = np.random.default_rng(seed)
        transforms_seed = int(random.integers(2**63))
        with self.open(index) as video:
            numbers = self.sampling.numbers(video.times, random, str(self.image_id(index)))
            is_padded = self.sampling.is_short(video.times)
            views, original_size = read_clips(video, numbers, self.transforms, transforms_seed)
        image_size = tuple(views.shape[-2:])
        self._check_size(image_size, index)
        target = {
            "label": self.label(index),
            "image_id": self.image_id(index),
            "image_size": image_size,
            "original_size": original_size,
            "is_padded": is_padded,
        }
        return Sample(image=views if len(views) > 1 else views[0], target=target)

    def load_frames(self, index: int, count: int) -> list[np.ndarray]:
        with self.open(index) as video:
            return list(video.frames(np.linspace(0, len(video.times) - 1, count).round().astype(int).tolist()))

    def load_image(self, index: int) -> np.ndarray:
        """Load the middle frame; see `BaseImageDataset`."""
        with self.open(index) as video:
            return next(video.frames([len(video.times) // 2]))

    def load_labeled(self, index: int) -> tuple[np.ndarray, int]:
        return self.load_image(index), self.label(index)

    def image_size(self, index: int) -> tuple[int, int]:
        with self.open(index) as video:
            return video.info.height, video.info.width


def read_clips(
    video: Video, numbers: np.ndarray, transforms: Transforms | None, seed: int
) -> tuple[Tensor, tuple[int, int]]:
    """Read clips of a video; each frame is decoded once, and transformed before the next is decoded.

    Args:
        numbers: (clips, T) frame numbers of the clips.
        transforms: image transforms; those with `views` give several crops.
        seed: seed of the transforms of all frames.
    Returns:
        (clips * crops, 3, T, H, W) uint8, the crops of the first clip first; and the stored frames' (height, width).
    """
    crops = getattr(transforms, "views", [transforms])
    needed = np.unique(numbers).tolist()
    clips = None
    for number, frame in zip(needed, video.frames(needed), strict=True):
        for crop, transform in enumerate(crops):
            image = frame if transform is None else transform(AnnotatedImage(frame), seed=seed).image
            if clips is None:
                shape = (len(numbers), len(crops), 3, numbers.shape[1], *image.shape[:2])
                clips = torch.empty(shape, dtype=torch.uint8)
            for clip, position in np.argwhere(numbers == number).tolist():
                clips[clip, crop, :, position] = to_tensor(image)
    return clips.flatten(0, 1), frame.shape[:2]


class ListedVideos(ListedFiles, ClipDataset):
    """Base of datasets that list videos with their labels; a video is a file or a folder of frames.

    Args:
        classes, transforms: see `ClipDataset`.
        num_frames, sampling_rate, frame_rate, temporal_jitter, num_clips, on_short: see `ClipSampling`.
    """

    def __init__(
        self,
        classes: Sequence[str],
        /,
        *,
        num_frames: int = 8,
        sampling_rate: int | None = 32,
        frame_rate: float = 30.0,
        temporal_jitter: bool = False,
        num_clips: int = 1,
        on_short: OnShort = "pad",
        transforms: Spec | Transforms | None = None,
    ):
        sampling = ClipSampling(num_frames, sampling_rate, frame_rate, temporal_jitter, num_clips, on_short)
        super().__init__(classes, transforms, sampling)

    def open(self, index: int) -> Video:
        return open_video(self.image_path(index), max_pixels=self.max_image_pixels)


@DATASETS.register
class VideoFolder(ListedVideos):
    """Videos in FOLDER/CLASS/: files, or folders of frames. The classes are the sorted names of the folders.

    Args:
        folder: folder of one split.
        options: the arguments of `ListedVideos`.
    Raises:
        DataError: there is no such folder, or it has no class folders or no video.
    """

    def __init__(self, folder: str | Path, **options: Any):
        classes = list_class_folders(Path(folder))
        super().__init__(classes, **options)
        names, labels, empty = [], [], []
        for label, class_name in enumerate(classes):
            inside = sorted(entry.name for entry in os.scandir(Path(folder, class_name)) if _is_video(entry))
            names += [f"{class_name}/{name}" for name in inside]
            labels += [label] * len(inside)
            empty += [] if inside else [class_name]
        if empty:
            what = f"videos ({', '.join(VIDEO_EXTENSIONS)}) or folders of frames"
            warn_of_empty_classes(Path(folder), empty, what, is_error=not names)
        self.list_files(folder, names, labels)


def _is_video(entry: os.DirEntry) -> bool:
    if is_hidden(entry.name) or is_output(Path(entry.path)):
        return False
    if entry.is_dir():
        return any(Path(name).suffix.lower() in IMAGE_SUFFIXES and not is_hidden(name) for name in os.listdir(entry))
    return entry.name.lower().endswith(VIDEO_EXTENSIONS)


@DATASETS.register
class VideoList(ListedVideos):
    """Videos in a text file with a line `PATH LABEL` for each, the format of Kinetics.

    Path and label are separated by a space, a tab or a comma. A label is a number from 0, or the name of a class. A
    path leads to a video file or a folder of frames.

    Args:
        list_file: the text file.
        folder: the folder that the paths are relative to.
        class_file: a text file with one class name per line, in the order of the labels; None: the classes are named by
            their numbers, up to the largest label in the list.
        on_missing: what to do if listed files do not exist: raise an error, or leave them out and log it.
        allow_outside: also read files outside the folder if a path leads there.
        options: the arguments of `ListedVideos`.
    Raises:
        DataError: a file is missing, or a line of the list is invalid.
    """

    def __init__(
        self,
        list_file: str | Path,
        folder: str | Path,
        *,
        class_file: str | Path | None = None,
        on_missing: OnMissing = "raise",
        allow_outside: bool = False,
        **options: Any,
    ):
        require_folders(folder=folder)
        classes = None if class_file is None else [line for _, line in _lines(class_file, "class_file")]
        names, labels = _read_list(Path(list_file), classes)
        if classes is None:
            classes = [str(label) for label in range(max(labels) + 1)]
        super().__init__(classes, **options)
        check_inside(folder, names, Path(list_file).name, allow_outside=allow_outside)
        self.list_files(folder, *_keep_existing(folder, names, labels, Path(list_file).name, on_missing))


def _lines(path: str | Path, key: str) -> list[tuple[int, str]]:
    """Read the lines of a file that may not be empty; see `read_lines`."""
    lines = read_lines(path, key, remedy=f"Correct data.root or `{key}`.")
    if not lines:
        raise DataError(f"{key}: '{path}' is empty. Expected a line for each video or class.")
    return lines


def _read_list(path: Path, classes: Sequence[str] | None) -> tuple[list[str], list[int]]:
    """Read the paths and labels of a list."""
    label_of = {name: label for label, name in enumerate(classes or ())}
    names, labels = [], []
    for number, line in _lines(path, "list_file"):
        name, separator, text = _split(line, label_of)
        entry = f"{path.name}, line {number}: {reprlib.repr(line)}"
        if not separator or not name:
            raise DataError(f"{entry}: expected a path and a label, separated by a space or a comma.")
        label = label_of.get(text, int(text) if _NUMBER.fullmatch(text) else None)
        if label is None:
            raise DataError(
                f"{entry}: label {reprlib.repr(text)} is neither a number from 0 to 99999 nor the name of a class. "
                + (nearest(text, label_of) if classes else "Set `class_file` to the names of the classes.")
            )
        if classes is not None and label >= len(classes):
            raise DataError(
                f"{entry}: label {label} is outside the {pluralize(len(classes), 'classes')} of class_file, "
                f"0 to {len(classes) - 1}."
            )
        names.append(name)
        labels.append(label)
    return names, labels


def _split(line: str, label_of: Mapping[str, int]) -> tuple[str, str, str]:
    """Split a line at its last separator or, as class names may have spaces, at the first one before a class name."""
    separators = [match.start() for match in re.finditer(r"[ \t,]", line)]
    for position in separators:
        if line[position + 1 :].strip().strip('"') in label_of:
            break
    else:
        position = separators[-1] if separators else len(line)
    label = line[position + 1 :].strip().strip('"')
    return line[:position].rstrip(" \t,").strip('"'), line[position : position + 1], label


@DATASETS.register
class SomethingSomething(ListedVideos):
    """Something-Something v2 (Goyal et al. 2017, https://arxiv.org/abs/1706.04261), and datasets of the same form.

    Args:
        annotations: JSON, a list of {"id": "78687", "template": "Holding [something]", ...}.
        labels: JSON, {"Holding something": "0", ...}.
        folder: folder of ID.webm (or another ending), or of folders ID/ with frames.
        sampling_rate: see `ClipSampling`.
        on_missing: see `VideoList`.
        options: the other arguments of `ListedVideos`.
    Raises:
        DataError: a file is missing, or an annotation is invalid.
    """

    def __init__(
        self,
        annotations: str | Path,
        labels: str | Path,
        folder: str | Path,
        *,
        sampling_rate: int | None = None,
        on_missing: OnMissing = "raise",
        **options: Any,
    ):
        require_folders(folder=folder)
        classes = _read_classes(labels)
        super().__init__(classes, sampling_rate=sampling_rate, **options)
        label_of = {name: label for label, name in enumerate(classes)}
        entries = read_json(annotations)
        if not isinstance(entries, list) or not entries:
            raise DataError(f"annotations: '{annotations}' is not a list of videos; expected [{{\"id\": ...}}, ...].")
        ids, video_labels = [], []
        for number, entry in enumerate(entries):
            entry_name = f"{Path(annotations).name}: annotation {number}"
            if not isinstance(entry, dict) or not {"id", "template"} <= entry.keys():
                raise DataError(f'{entry_name} is {str(entry)[:100]}; expected an object with "id" and "template".')
            name = str(entry["template"]).replace("[", "").replace("]", "")
            if name not in label_of:
                raise DataError(f"{entry_name}: template {name!r} is not in '{labels}'. {nearest(name, label_of)}")
            ids.append(str(entry["id"]))
            video_labels.append(label_of[name])
        check_inside(folder, ids, Path(annotations).name)
        stems = {Path(entry).stem: entry for entry in sorted(os.listdir(folder), reverse=True) if not is_hidden(entry)}
        names = [stems.get(video_id, video_id) for video_id in ids]
        self.list_files(folder, *_keep_existing(folder, names, video_labels, Path(annotations).name, on_missing))


def _read_classes(path: str | Path) -> list[str]:
    """Return the classes of a JSON file of names and numbers, in the order of the numbers."""
    names = read_json(path, key="labels")
    try:
        numbers = {int(number): name for name, number in names.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        numbers = {}
    if not numbers or sorted(numbers) != list(range(len(names))):
        raise DataError(
            f'labels: \'{path}\' does not number its classes from 0; expected {{"Holding something": "0", ...}}.'
        )
    return [numbers[label] for label in range(len(numbers))]


def _keep_existing(
    folder: str | Path, names: Sequence[str], labels: Sequence[int], source: str, on_missing: OnMissing
) -> tuple[list[str], list[int]]:
    """Return the names that exist and their labels; listing every folder once is faster than checking every file."""
    listed: dict[str, set[str]] = {}
    exist = []
    for name in names:
        parent, base = os.path.split(os.path.join(folder, name))
        if parent not in listed:
            listed[parent] = set(os.listdir(parent)) if os.path.isdir(parent) else set()
        exist.append(base in listed[parent])
    if num_missing := exist.count(False):
        first = names[exist.index(False)]
        message = f"{source}: {num_missing} of {len(names)} videos do not exist, the first is '{Path(folder, first)}'."
        if on_missing == "raise" or num_missing == len(names):
            raise DataError(
                f"{message} Check that `folder` is the one that the paths begin in; or set on_missing=skip for this "
                "dataset to leave them out."
            )
        logger.warning("%s They are left out (on_missing=skip).", message)
    return [*compress(names, exist)], [*compress(labels, exist)]
