"""A model's predictions for one image: as values, drawn, saved, or converted for other libraries."""

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitkit.apps.visualization.predictions import FIELDS, draw_prediction
from vitkit.errors import ConfigError
from vitkit.evaluation.coco import masks_to_rle
from vitkit.io.folders import declare_output
from vitkit.io.output import write_bytes
from vitkit.models.query_masks import QueryMasks
from vitkit.ops.label_maps import count_values
from vitkit.registry import nearest
from vitkit.structures import KeypointInfo, ScoreThresholds

if TYPE_CHECKING:
    import pandas
    import supervision

_MAX_CLASSES = 5  # listed for a classified image
Threshold = float | Mapping[str, float]
"""The lowest score of objects, of all or by class name; "*" stands for all others, which otherwise keep the model's."""
_PER_OBJECT = ("scores", "labels", "boxes_xyxy", "masks", "keypoints")


@dataclass(repr=False)
class Prediction:
    """The predictions of one image.

    `fields` holds everything that the model predicted. `boxes`, `labels`, `names`, `scores` and `masks`, the drawing
    and the written results contain only the objects that reach `thresholds`, the highest score first; `filter` selects
    others.
    """

    name: str
    """The file's path, or the image's number."""
    image: np.ndarray
    """(H, W, 3) uint8 RGB, upright."""
    fields: dict[str, Any]
    """What the model's `postprocess` or `generate` returned, on the CPU, in pixels of `image`; masks may be made only
    when they are asked for by index, all by `fields["masks"][:]`."""
    classes: Sequence[str]
    thresholds: ScoreThresholds = field(default_factory=ScoreThresholds)
    category_ids: Sequence[int | str] | None = None
    """The category id of each class in the annotations, for `to_coco`; None: the labels are used."""
    keypoint_info: KeypointInfo | None = None
    """The names of predicted keypoints, and the limbs between them; None: unknown, or none are predicted."""

    @property
    def task(self) -> str:
        """The first task of FIELDS that the model predicts."""
        return next(task for task, name in FIELDS.items() if name in self.fields)

    @cached_property
    def _order(self) -> Tensor:
        """Indices into `fields` of the objects that reach their thresholds, the highest score first."""
        scores: Tensor = self.fields["scores"]
        order = scores.argsort(descending=True, stable=True)
        return order[(scores >= self._limits)[order]]

    @cached_property
    def _limits(self) -> Tensor:
        """(N,) float32: the threshold of each object in `fields`."""
        return self.thresholds.of(self.fields["labels"])

    def _objects(self, name: str) -> Tensor | None:
        return self.fields[name][self._order] if name in self.fields else None

    @property
    def boxes(self) -> Tensor | None:
        """(N, 4) float32 xyxy in pixels of the image; None if the model predicts no boxes."""
        return self._objects("boxes_xyxy")

    @cached_property
    def masks(self) -> Tensor | None:
        """(N, H, W) bool; None if the model predicts no masks."""
        return self._objects("masks")

    @property
    def keypoints(self) -> Tensor | None:
        """(N, K, 3) float32 x, y in pixels of the image and confidence; None if the model predicts no keypoints."""
        return self._objects("keypoints")

    @property
    def labels(self) -> Tensor | None:
        """(N,) int64: the class of each object or panoptic segment, or the five most probable classes of the image."""
        if "scores" in self.fields:
            return self._objects("labels")
        if "class_scores" in self.fields:
            return self._best_classes[1]
        return (
            torch.tensor([s["label"] for s in self.segments], dtype=torch.int64) if "panoptic" in self.fields else None
        )

    @property
    def scores(self) -> Tensor | None:
        """(N,) float32 in 0..1, one for each of `labels`."""
        if "scores" in self.fields:
            return self._objects("scores")
        if "class_scores" in self.fields:
            return self._best_classes[0]
        return torch.tensor([s["score"] for s in self.segments]) if "panoptic" in self.fields else None

    @property
    def names(self) -> list[str] | None:
        """The class name of each of `labels`."""
        return None if self.labels is None else [name for name, _, _ in self._list_classified()]

    def _list_classified(self) -> list[tuple[str, int, float]]:
        """Return name, label and score of each object, segment or class; an empty list without classes."""
        labels, scores = self.labels, self.scores
        if labels is None or scores is None:
            return []
        return [(self.classes[label], label, score) for label, score in zip(labels.tolist(), scores.tolist())]

    @property
    def panoptic(self) -> Tensor | None:
        """(H, W) int32 segment ids, 0 is void; None if the model predicts no panoptic map. See also `segments`."""
        return self.fields.get("panoptic")

    @property
    def segments(self) -> list[dict[str, Any]]:
        """id, label and score of each panoptic segment."""
        segments: list[dict[str, Any]] = self.fields.get("segments_info", [])
        return segments

    @property
    def semantic(self) -> Tensor | None:
        """(H, W) int64 class of each pixel; None if the model predicts no semantic map."""
        return self.fields.get("semantic")

    @property
    def text(self) -> str | None:
        """The caption; None if the model writes none."""
        return self.fields.get("text")

    @property
    def _best_classes(self) -> tuple[Tensor, Tensor]:
        best = self.fields["class_scores"].topk(min(_MAX_CLASSES, len(self.classes)))
        return best.values, best.indices

    @property
    def uncertainty(self) -> float:
        """1 if an object's score equals its threshold, 0 if all scores are 0 or 1 (or there is no object): images to be
        looked at first have the highest."""
        scores, limits = self.fields["scores"].float().numpy(), self._limits.numpy()  # a third of the time of tensors
        if not len(scores):
            return 0.0
        largest = np.where(scores >= limits, 1 - limits, limits).clip(1e-6)
        return float(1 - (np.abs(scores - limits) / largest).min())

    def __len__(self) -> int:
        """The number of objects, segments or classes."""
        return 0 if (labels := self.labels) is None else len(labels)

    def filter(self, classes: Sequence[str] | str | None = None, *, score: Threshold | None = None) -> "Prediction":
        """Return the prediction with only the selected objects; semantic maps, image classes and captions stay.

        Args:
            classes: names of the classes to keep; None: all.
            score: the lowest score to keep, for all classes or by name, {"cat": 0.3}; it may be lower than
                `thresholds`. None: `thresholds`.
        Raises:
            ConfigError: the model has no such class.
        """
        fields, thresholds = dict(self.fields), self.thresholds
        if isinstance(classes, int | float):
            raise ConfigError(f"filter: classes is {classes}; expected names. Of scores: filter(score={classes}).")
        if score is not None:
            thresholds = make_threshold(score, self.classes, thresholds)
        wanted = [classes] if isinstance(classes, str) else list(self.classes if classes is None else classes)
        for name in wanted:
            if name not in self.classes:
                raise ConfigError(f"filter: the model has no class {name!r}. {nearest(str(name), self.classes)}")
        labels = torch.tensor([self.classes.index(name) for name in wanted], dtype=torch.int64)
        if "scores" in fields:
            kept = torch.isin(fields["labels"], labels)
            of_objects = {name: fields[name] for name in _PER_OBJECT if name in fields}
            fields |= {name: v.select(kept) if isinstance(v, QueryMasks) else v[kept] for name, v in of_objects.items()}
        if "panoptic" in fields:
            lowest = {"*": score or 0.0} if not isinstance(score, Mapping) else {"*": 0.0, **score}
            segments = [
                s
                for s in self.segments
                if s["label"] in labels.tolist() and s["score"] >= lowest.get(self.classes[s["label"]], lowest["*"])
            ]
            ids = torch.tensor([s["id"] for s in segments], dtype=fields["panoptic"].dtype)
            fields["panoptic"] = fields["panoptic"].where(torch.isin(fields["panoptic"], ids), 0)
            fields["segments_info"] = segments
        return replace(self, fields=fields, thresholds=thresholds)

    def _from(self, score: Threshold | None) -> "Prediction":
        return self if score is None else self.filter(score=score)

    def summary(self) -> str:
        """Return one line with the predictions and their score threshold, or with the best score if none reaches it."""
        if self.text is not None:
            return f"{self.name}: {self.text}"
        if "class_scores" in self.fields:
            return f"{self.name}: {', '.join(f'{name} {score:.2f}' for name, _, score in self._list_classified())}"
        if self.semantic is not None and self.labels is None:
            return f"{self.name}: {', '.join(self.to_json()['areas'])}"
        if len(self):
            counted = Counter(name for name, _, _ in self._list_classified()).most_common()
            counts = ", ".join(f"{count} {name}" for name, count in counted)
            return f"{self.name}: {counts}" + (f"; from {self.thresholds}" if "scores" in self.fields else "")
        if not len(self.fields.get("scores", ())):
            return f"{self.name}: nothing"
        best = int(self.fields["scores"].argmax())
        label, score = self.fields["labels"][best], float(self.fields["scores"][best])
        name, lowest = self.classes[int(label)], f"{float(self.thresholds.of(label)):.2f}"
        which = name if lowest == self.thresholds.interval else f"{name}, shown from {lowest}"
        return f"{self.name}: nothing from {self.thresholds}; the best is {score:.2f} ({which})"

    __repr__ = summary

    def draw(
        self, *, task: str | None = None, score_threshold: Threshold | None = None, best: bool = True
    ) -> np.ndarray:
        """Draw the predictions on the image.

        Args:
            task: one of the model's tasks; None: `self.task`.
            score_threshold: objects with a lower score are left out, see `filter`; None: those below `thresholds`.
            best: whether the best box is drawn, dashed, if no object reaches its threshold.
        Returns:
            (H', W', 3) uint8 RGB; small images are upscaled, and some tasks have a legend below.
        Raises:
            ConfigError: the model does not do that task.
        """
        task = self.task if task is None else task
        if FIELDS.get(task) not in self.fields:
            tasks = [name for name, key in FIELDS.items() if key in self.fields]
            raise ConfigError(f"task {task!r}: the model does not predict it. {nearest(task, tasks)}")
        chosen = self._from(score_threshold)
        return draw_prediction(
            self.image,
            chosen.fields,
            self.classes,
            FIELDS[task],
            thresholds=chosen.thresholds,
            best=best,
            keypoints=self.keypoint_info,
        )

    def save(self, path: str | Path, *, task: str | None = None, score_threshold: Threshold | None = None) -> None:
        """Save `draw(...)` in the format of the path's extension. PNG takes many times as long to write as JPEG.

        Raises:
            ConfigError: see `draw`; or the extension is not that of an image format.
            DataError: the file cannot be written.
        """
        path = Path(path)
        form = Image.registered_extensions().get(path.suffix.lower())
        if form not in Image.SAVE:
            raise ConfigError(f"save: '{path}' does not have the extension of an image format, such as .jpg or .png.")
        declare_output(path)
        write_bytes(path, self.encode(form, task=task, score_threshold=score_threshold))

    def encode(self, form: str = "PNG", *, task: str | None = None, score_threshold: Threshold | None = None) -> bytes:
        """Return `draw(...)` as the content of a file, in a format that Pillow names.

        Raises:
            ConfigError: see `draw`.
        """
        # In memory: Pillow does not notice that a disk is full while it writes a JPEG.
        buffer = io.BytesIO()
        # Without subsampling, thin lines keep their colors.
        options = {"quality": 90, "subsampling": 0} if form == "JPEG" else {}
        Image.fromarray(self.draw(task=task, score_threshold=score_threshold)).save(buffer, form, **options)
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        """The drawn image, which notebooks show."""
        return self.encode()

    def crop(self) -> list[np.ndarray]:
        """Return the part of the image in each of `boxes`, (h, w, 3) uint8 RGB, each of at least one pixel.

        Raises:
            ConfigError: the model predicts no boxes.
        """
        height, width = self.image.shape[:2]
        crops = []
        for x0, y0, x1, y1 in self._require_boxes("crop").tolist():
            left, top = (min(max(math.floor(low), 0), side - 1) for low, side in ((x0, width), (y0, height)))
            right, bottom = max(math.ceil(x1), left + 1), max(math.ceil(y1), top + 1)
            crops.append(self.image[top:bottom, left:right])
        return crops

    def _require_boxes(self, method: str) -> Tensor:
        if self.boxes is None:
            raise ConfigError(f"{method}: needs boxes, and the model predicts {', '.join(self.fields)}.")
        return self.boxes

    def to_coco(self, image_id: int) -> list[dict[str, Any]]:
        """Return the objects in COCO's result format: boxes are xywh in pixels, masks are run lengths,
        keypoints x, y and confidence of each.

        Raises:
            ConfigError: the model predicts no boxes.
        """
        boxes_xywh = self._require_boxes("to_coco").clone()
        boxes_xywh[:, 2:] -= boxes_xywh[:, :2]
        masks = [None] * len(boxes_xywh) if self.masks is None else masks_to_rle(self.masks)
        points = [None] * len(boxes_xywh) if self.keypoints is None else self.keypoints.flatten(1).tolist()
        return [
            {
                "image_id": image_id,
                "category_id": label if self.category_ids is None else self.category_ids[label],
                "bbox": box,
                "score": score,
                **({} if mask is None else {"segmentation": mask}),
                **({} if values is None else {"keypoints": values}),
            }
            for (_, label, score), box, mask, values in zip(self._list_classified(), boxes_xywh.tolist(), masks, points)
        ]

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a row for each of `labels`: class, label, score and, if there are boxes, x0, y0, x1, y1 in pixels.

        Raises:
            ConfigError: pandas is not installed, or the model predicts no classes.
        """
        pandas = _import("pandas", "to_pandas")
        if self.labels is None:
            raise ConfigError(f"to_pandas: needs classes, and the model predicts {', '.join(self.fields)}.")
        names, labels, scores = zip(*self._list_classified()) if len(self) else ((), (), ())
        columns = {"class": names, "label": labels, "score": scores}
        if self.boxes is not None:
            columns |= dict(zip(("x0", "y0", "x1", "y1"), self.boxes.T.tolist()))
        return pandas.DataFrame(columns)

    def to_supervision(self) -> "supervision.Detections":
        """Return the objects as `supervision.Detections`.

        Raises:
            ConfigError: supervision is not installed, or the model predicts no boxes.
        """
        supervision = _import("supervision", "to_supervision")
        boxes_xyxy, masks, scores, labels = self._require_boxes("to_supervision"), self.masks, self.scores, self.labels
        assert scores is not None and labels is not None  # boxes have both
        return supervision.Detections(
            xyxy=boxes_xyxy.numpy(),
            mask=None if masks is None else masks.numpy(),
            confidence=scores.numpy(),
            class_id=labels.numpy(),
            data={"class_name": np.array(self.names)},
        )

    def to_json(self, *, score_threshold: Threshold | None = None) -> dict[str, Any]:
        """Return the predictions as plain values.

        Args:
            score_threshold: objects with a lower score are left out, see `filter`; None: those below `thresholds`.
        Returns:
            image, width, height, and depending on the task
            objects: class, score, box_xyxy in pixels and, if there are masks, mask as COCO's run lengths, or, if there
            are keypoints, keypoints: [x, y, confidence] by name, best first;
            threshold: the score threshold of the objects, and its origin; uncertainty;
            segments: id, class, score and area in pixels of the panoptic map;
            areas: class -> share of the semantic map, largest first;
            classes: class and score, best first, at most five;
            text and score of a caption.
        """
        height, width = self.image.shape[:2]
        result: dict[str, Any] = {"image": self.name, "width": width, "height": height}
        chosen = self._from(score_threshold) if {"scores", "panoptic"} & self.fields.keys() else self
        if "scores" in self.fields:
            result["objects"] = chosen._json_objects()
            result["uncertainty"] = self.uncertainty
            result["threshold"] = {"score": chosen.thresholds.overall, "origin": chosen.thresholds.origin}
        if "panoptic" in self.fields:
            ids, pixels = count_values(chosen.fields["panoptic"].numpy())
            area = dict(zip(ids.tolist(), pixels.tolist()))
            result["segments"] = [
                {"id": s["id"], "class": self.classes[s["label"]], "score": s["score"], "area": area.get(s["id"], 0)}
                for s in chosen.segments
            ]
        if "semantic" in self.fields:
            labels, pixels = count_values(self.fields["semantic"].numpy())
            largest_first = sorted(zip(pixels.tolist(), labels.tolist()), reverse=True)
            result["areas"] = {self.classes[label]: count / (height * width) for count, label in largest_first}
        if "class_scores" in self.fields:
            result["classes"] = [{"class": name, "score": score} for name, _, score in self._list_classified()]
        if self.text is not None:
            result |= {"text": self.text, "score": self.fields["score"]}
        return result

    def _json_objects(self) -> list[dict[str, Any]]:
        masks = [None] * len(self._order) if self.masks is None else masks_to_rle(self.masks)
        objects = [
            {"class": name, "score": score, "box_xyxy": box, **({} if mask is None else {"mask": mask})}
            for (name, _, score), box, mask in zip(
                self._list_classified(), self._require_boxes("to_json").tolist(), masks
            )
        ]
        if self.keypoints is not None:
            info, count = self.keypoint_info, self.keypoints.shape[1]
            names = [f"point_{k}" for k in range(count)] if info is None else info.names
            for found, points in zip(objects, self.keypoints.tolist()):
                found["keypoints"] = dict(zip(names, points, strict=True))
        return objects


def make_threshold(score: Threshold, classes: Sequence[str], others: ScoreThresholds) -> ScoreThresholds:
    """Return the thresholds that a caller asks for.

    Args:
        score: one for all classes, or those of some by name.
        classes: the names of the classes.
        others: the thresholds of the classes that are not named, unless "*" is.
    Raises:
        ConfigError: a score is not in 0..1, or there is no such class.
    """
    if not isinstance(score, Mapping):
        return ScoreThresholds(_check_score(score), origin="as asked for")
    by_name = {name: _check_score(value) for name, value in score.items()}
    for name in by_name.keys() - {"*"}:
        if name not in classes:
            raise ConfigError(f"threshold: the model has no class {name!r}. {nearest(str(name), classes)}")
    if "*" in by_name:
        others = ScoreThresholds(by_name["*"])
    of_others = others.by_class or [None] * len(classes)
    by_class = tuple(by_name.get(name, value) for name, value in zip(classes, of_others))
    return ScoreThresholds(others.overall, by_class, origin="as asked for")


def _check_score(score: float) -> float:
    try:
        value = float(score)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value <= 1:
        raise ConfigError(f"threshold {score!r}: expected a score, 0 to 1.")
    return value


def _import(module: str, method: str) -> Any:
    """Import a library that vitkit does not need itself.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        return __import__(module)
    except ImportError as error:
        raise ConfigError(
            f"{method}: {module} cannot be imported ({error}). Install it: pip install {module}."
        ) from error
