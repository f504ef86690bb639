"""From trained weights to predictions that draw themselves.

from vitkit.inference import load

predictor = load("detr_r50")                                      # a name of the model zoo
predictor = load("configs/detr_r50.py", "runs/detr_r50/best.pth") # a config and its weights
predictor = load("runs/detr_r50")                                 # a run
for prediction in predictor.predict(["street.jpg", "park.jpg"]):
    prediction.save(f"drawn_{prediction.name}.png")
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torch import Tensor, nn

from vitkit import model_zoo
from vitkit.checkpoint import LoadReport, classes_of, load_weights, read_checkpoint
from vitkit.config import load_config
from vitkit.data.collate import collate
from vitkit.data.images import read_image, to_tensor
from vitkit.engine.evaluate import autocast
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.coco import masks_to_rle
from vitkit.model_zoo.converters import COCO_CLASSES, COCO_PANOPTIC_CLASSES
from vitkit.models import build_model
from vitkit.registry import TRANSFORMS, nearest
from vitkit.structures import Batch
from vitkit.visualization.boxes import draw_detections
from vitkit.visualization.classification import draw_classes
from vitkit.visualization.masks import draw_masks, draw_panoptic, draw_semantic

RUN_CONFIG, RUN_WEIGHTS = "config.json", ("best.pth", "last.pth")
"""In a run's folder; the first weights that are there."""
FIELDS = {
    "panoptic": "panoptic",
    "semantic": "semantic",
    "instance": "masks",
    "detection": "boxes_xyxy",
    "classification": "class_scores",
}
"""Task -> the field by which its predictions are known; of several tasks the first that is there is drawn."""
_MOST_CLASSES = 5  # of a classified image
_NOTHING = np.zeros((0, 4), np.float32), np.zeros(0, np.int64)

Picture = str | Path | np.ndarray | Image.Image
"""A file, an array (H, W, 3) uint8 RGB, or a Pillow image."""


@dataclass
class Prediction:
    """What a model found in one image."""

    name: str
    """The file's path, or the image's number."""
    image: np.ndarray
    """(H, W, 3) uint8 RGB, upright."""
    fields: dict[str, Any]
    """What the model's `postprocess` returned, on the CPU, in pixels of `image`."""
    classes: Sequence[str]

    @property
    def task(self) -> str:
        """The first of FIELDS that the model predicts."""
        return next(task for task, field in FIELDS.items() if field in self.fields)

    def draw(self, *, task: str | None = None, score_threshold: float = 0.5) -> np.ndarray:
        """The image with what was found in it.

        Args:
            task: of a model that has several; None: `self.task`.
            score_threshold: objects below it are left out.
        Returns:
            (H', W', 3) uint8 RGB; small images are enlarged, and some tasks have a legend below.
        Raises:
            ConfigError: the model does not do that task.
        """
        task = self.task if task is None else task
        if FIELDS.get(task) not in self.fields:
            ours = [name for name, field in FIELDS.items() if field in self.fields]
            raise ConfigError(f"task {task!r}: the model does not predict it. {nearest(task, ours)}")
        fields = self.fields
        if task == "panoptic":
            return draw_panoptic(self.image, fields["panoptic"], fields["segments_info"], self.classes)
        if task == "semantic":
            return draw_semantic(self.image, fields["semantic"], self.classes)
        if task == "classification":
            return draw_classes(self.image, fields["class_scores"], self.classes, most=_MOST_CLASSES)
        kept = fields["scores"] >= score_threshold
        labels, scores = fields["labels"][kept], fields["scores"][kept]
        if task == "instance":
            return draw_masks(self.image, fields["masks"][kept], labels, self.classes, scores)
        return draw_detections(self.image, fields["boxes_xyxy"][kept], labels, self.classes, scores)

    def save(self, path: str | Path, *, task: str | None = None, score_threshold: float = 0.5) -> None:
        """Saves `draw(...)`; the format follows the path's ending."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(self.draw(task=task, score_threshold=score_threshold)).save(path)

    def as_json(self, *, score_threshold: float = 0.0) -> dict[str, Any]:
        """Plain values, as JSON holds them.

        Returns:
            image, width, height, and by task
            objects: class, score, box_xyxy in pixels and, if there are masks, mask as COCO's run lengths, best first;
            segments: id, class, score and area in pixels of the panoptic map;
            areas: class -> part of the image, of the semantic map, largest first;
            classes: class and score, best first, at most five.
        """
        height, width = self.image.shape[:2]
        result: dict[str, Any] = {"image": self.name, "width": width, "height": height}
        if "scores" in self.fields:
            result["objects"] = self._objects(score_threshold)
        if "panoptic" in self.fields:
            ids, pixels = self.fields["panoptic"].unique(return_counts=True)
            area = dict(zip(ids.tolist(), pixels.tolist()))
            result["segments"] = [
                {"id": s["id"], "class": self.classes[s["label"]], "score": s["score"], "area": area.get(s["id"], 0)}
                for s in self.fields["segments_info"]
            ]
        if "semantic" in self.fields:
            labels, pixels = self.fields["semantic"].unique(return_counts=True)
            found = sorted(zip(pixels.tolist(), labels.tolist()), reverse=True)
            result["areas"] = {self.classes[label]: count / (height * width) for count, label in found}
        if "class_scores" in self.fields:
            scores, labels = self.fields["class_scores"].topk(min(_MOST_CLASSES, len(self.classes)))
            found = zip(labels.tolist(), scores.tolist())
            result["classes"] = [{"class": self.classes[label], "score": score} for label, score in found]
        return result

    def _objects(self, score_threshold: float) -> list[dict[str, Any]]:
        scores = self.fields["scores"]
        order = [i for i in scores.argsort(descending=True).tolist() if scores[i] >= score_threshold]
        masks = masks_to_rle(self.fields["masks"][order]) if "masks" in self.fields else [None] * len(order)
        return [
            {
                "class": self.classes[int(self.fields["labels"][i])],
                "score": float(scores[i]),
                "box_xyxy": self.fields["boxes_xyxy"][i].tolist(),
                **({} if mask is None else {"mask": mask}),
            }
            for i, mask in zip(order, masks)
        ]


class Predictor:
    """A model with what its images need; made by `load`.

    Args:
        model: on its device, in evaluation mode.
        classes: names of its labels.
        transforms: what its validation images went through.
        precision: of autocast; "bf16" takes about half the memory.
        report: what loading the weights did.
    """

    def __init__(
        self,
        model: nn.Module,
        classes: Sequence[str],
        *,
        transforms: Any = None,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        report: LoadReport | None = None,
    ):
        self.model = model.eval()
        self.report = report
        self.classes = list(classes)
        self.transforms = None if transforms is None else TRANSFORMS.build(transforms)
        self.precision = precision
        self.device = next(model.parameters()).device
        if not hasattr(model, "postprocess"):
            raise ConfigError(f"{type(model).__name__} predicts nothing of images: it has no postprocess().")

    def predict(self, images: Iterable[Picture], *, batch_size: int = 1) -> list[Prediction]:
        """Finds what is in the images; see `stream`."""
        return list(self.stream(images, batch_size=batch_size))

    def stream(self, images: Iterable[Picture | tuple[str, Picture]], *, batch_size: int = 1) -> Iterator[Prediction]:
        """Finds what is in the images, a batch at a time, so that they may be more than memory holds.

        Args:
            images: pictures, or pairs of a name and a picture.
            batch_size: with more than one, images of different sizes are padded, which changes the results of models
                that do not isolate padding.
        Raises:
            DataError: a file is missing or no image, or an array no image.
        """
        numbered = enumerate(images)
        while some := list(itertools.islice(numbered, batch_size)):
            named = [item if isinstance(item, tuple) else (picture_name(item, k), item) for k, item in some]
            pictures = [to_array(picture, name) for name, picture in named]
            for (name, _), picture, fields in zip(named, pictures, self.run(pictures)):
                yield Prediction(name, picture, fields, self.classes)

    @torch.inference_mode()
    def run(self, pictures: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """What the model's `postprocess` returns for arrays (H, W, 3) uint8 RGB, one batch, on the CPU."""
        batch = self.prepare(pictures).to(self.device)
        with autocast(self.device, self.precision):
            outputs = self.model(**batch.inputs)
            results = self.model.postprocess(outputs, [picture.shape[:2] for picture in pictures])
        return [{key: v.cpu() if isinstance(v, Tensor) else v for key, v in result.items()} for result in results]

    def prepare(self, pictures: Sequence[np.ndarray]) -> Batch:
        """A batch of arrays (H, W, 3) uint8 RGB, which go through the transforms of validation images."""
        if self.transforms is not None:
            pictures = [self.transforms(picture, *_NOTHING, None, seed=0).image for picture in pictures]
        return collate([{"image": to_tensor(picture), "target": {}} for picture in pictures])


def picture_name(picture: Picture, number: int) -> str:
    return str(picture) if isinstance(picture, str | Path) else f"image_{number}"


def to_array(picture: Picture, name: str = "image") -> np.ndarray:
    """(H, W, 3) uint8 RGB.

    Raises:
        DataError: a file is missing or no image, or an array no image.
    """
    if isinstance(picture, str | Path):
        if not Path(picture).is_file():
            raise DataError(f"no file '{picture}'. Give the path of a picture.")
        return read_image(picture)
    if isinstance(picture, Image.Image):
        return np.asarray(picture.convert("RGB"))
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.shape[2:] != (3,):
        got = f"{picture.dtype} {picture.shape}" if isinstance(picture, np.ndarray) else type(picture).__name__
        raise DataError(f"{name}: got {got}; expected a file, a Pillow image, or an array (H, W, 3) of uint8 RGB.")
    if not picture.size:
        raise DataError(f"{name}: an array of shape {picture.shape} has no pixels.")
    return picture


def load(
    source: str | Path | Mapping[str, Any],
    weights: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    classes: Sequence[str] | None = None,
    things: Sequence[bool] | None = None,
    device: str | torch.device = "cpu",
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
) -> Predictor:
    """A trained model, ready to predict.

    Args:
        source: a name of the model zoo, whose weights are downloaded once; the folder of a run; a config file, or what
            `load_config` returned.
        weights: a checkpoint, or a name of the model zoo; None: those that belong to `source`, which is no config then.
        overrides: `key.sub=value` of the config.
        classes: names of the labels; None: those that it was trained on, see `trained_classes`.
        things: of each class whether it has instances, for panoptic models; None: as it was trained.
        device: "cpu" or "cuda".
        precision: of autocast.
    Raises:
        ConfigError: there is no such config or run, or it states no weights.
        CheckpointError: the weights cannot be read, or do not fit the model.
    """
    config, weights = _find(source, weights, overrides)
    if not isinstance(config.get("model"), str | Mapping):
        raise ConfigError(f"{getattr(config, 'path', 'config')}: model is not set, so there is nothing to load.")
    if classes is None:
        classes, known_things = trained_classes(weights, config)
        things = known_things if things is None else things
    model = build_model(config["model"], classes=classes, things=things)
    report = load_weights(model, weights, classes=classes)
    transforms = _section(config, "data", "val").get("transforms")
    return Predictor(model.to(device), classes, transforms=transforms, precision=precision, report=report)


def _find(
    source: str | Path | Mapping[str, Any], weights: str | Path | None, overrides: Sequence[str]
) -> tuple[Mapping[str, Any], str | Path]:
    """The config and the weights that are meant."""
    if isinstance(source, Mapping):
        config = source
    elif str(source) in model_zoo.index() and not Path(source).exists():
        weights = str(source) if weights is None else weights
        config = load_config(model_zoo.index()[str(source)]["config"], overrides)
    elif Path(source).is_dir():
        if weights is None:
            weights = _run_weights(Path(source))
        config = load_config(Path(source) / RUN_CONFIG, overrides)
    elif Path(source).suffix in (".py", ".json"):
        config = load_config(source, overrides)
    else:
        raise ConfigError(
            f"{str(source)!r} is neither a config file (.py), nor a run's folder, nor a model of the zoo. "
            f"{nearest(str(source), model_zoo.index())}"
        )
    if weights is None:
        raise ConfigError(f"{source}: a config has no weights. Give a checkpoint, or the folder of a run.")
    return config, weights


def _run_weights(folder: Path) -> Path:
    found = [folder / name for name in RUN_WEIGHTS if (folder / name).is_file()]
    if not found or not (folder / RUN_CONFIG).is_file():
        raise ConfigError(
            f"'{folder}' holds no run: expected {RUN_CONFIG} and {' or '.join(RUN_WEIGHTS)}, as training writes them."
        )
    return found[0]


class TrainedOn(NamedTuple):
    """The classes of a checkpoint."""

    classes: Sequence[str]
    things: Sequence[bool] | None
    """Of each whether it has instances; None if that is not known."""


def trained_classes(weights: str | Path, config: Mapping[str, Any]) -> TrainedOn:
    """The classes that weights were trained on.

    A run's checkpoint says so. Official ones do not: theirs are those that the config's validation data states, of a
    classifier ImageNet's, and of all others COCO's, panoptic or not as that data is.
    """
    if str(weights) not in model_zoo.index() or Path(weights).exists():
        checkpoint = read_checkpoint(weights, whole=False)
        known = classes_of(checkpoint, str(weights))
        if known:
            return TrainedOn(known, checkpoint.get("things"))
    val = _section(config, "data", "val")
    if val.get("classes"):
        return _stated_classes(val)
    model = config["model"]
    if (model if isinstance(model, str) else model.get("type")) == "Classifier":
        names = ImageNetInfo("imagenet-1k")
        return TrainedOn([names.index_to_description(k) for k in range(names.num_classes())], None)
    if val.get("type") == "CocoPanoptic" and val.get("task") != "instance":
        return TrainedOn(list(COCO_PANOPTIC_CLASSES), [name in COCO_CLASSES for name in COCO_PANOPTIC_CLASSES])
    return TrainedOn(list(COCO_CLASSES), None)


def _stated_classes(val: Mapping[str, Any]) -> TrainedOn:
    """Those of a dataset whose config names them, and perhaps its things; all are things for instances."""
    classes, things = list(val["classes"]), val.get("things")
    if things is None:
        return TrainedOn(classes, None)
    if val.get("task") == "instance":
        classes = [name for name in classes if name in things]
    return TrainedOn(classes, [name in things for name in classes])


def _section(config: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """What lies below the keys; empty if there is nothing, or a plain name."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}
