"""Scores predictions that were saved earlier: a run's, or a results file's with its config or only annotations."""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from vitkit.apps.inference import find_model, find_trained
from vitkit.apps.training.api import test
from vitkit.config import Config
from vitkit.data.datasets.coco_file import AnnotationSource, DetectionFile
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import Split
from vitkit.engine.consistency import fingerprint
from vitkit.engine.settings import require
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.base import read_results
from vitkit.evaluation.classification import ClassificationEvaluator
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.evaluation.text import TextEvaluator
from vitkit.io.coco_schema import Entries, Field, FileIssue, file_issue, object_issues, raise_issues, sentence_issues
from vitkit.io.image_files import path_inside, read_image
from vitkit.io.json_files import read_json
from vitkit.io.local_cache import file_digest
from vitkit.io.output import write_text
from vitkit.io.segmentations import object_area
from vitkit.protocols.dataset import Dataset
from vitkit.protocols.evaluator import Evaluator
from vitkit.registry import EVALUATORS
from vitkit.text_format import is_name
from vitkit.weights.locate import RUN_CONFIG, Located

logger = logging.getLogger("vitkit")
_NO_RESULTS = (
    ({"images", "annotations", "categories"}, "these are annotations in COCO's format"),
    ({"images", "model", "classes"}, "these are the predictions that vitkit predict writes"),
)
"""Keys of JSON files that are taken for results, and what they are."""


class ScoredResults(NamedTuple):
    """A model's predictions with their metrics."""

    name: str
    evaluator: Evaluator
    """The evaluator, after `compute`."""
    config: Config | None
    folder: Path | None
    """The run's folder; None if the results are not a run's."""


class _GroundTruth(Dataset):
    """A dataset for evaluation only: it has no samples for a model."""

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: Any) -> NoReturn:
        self._lacks("samples")


class AnnotatedFile(_GroundTruth):
    """A dataset of annotations whose images are optional, for scoring only; see `CocoDetection` for training.

    Args:
        annotations: annotations in COCO's format or, if the images are available, in another one.
        images: folder of the images; None: there are no images.
    """

    annotations = ("objects",)

    def __init__(self, annotations: str | Path, images: str | Path | None = None):
        self.has_images = images is not None
        self.annotation_file, self._images = Path(annotations), None if images is None else Path(images)
        # For COCO's format, the folder of the images is not searched for annotations.
        source = AnnotationSource(self.annotation_file, self._images or self.annotation_file.parent)
        file = DetectionFile(source, masks=False, drop_bad_boxes=True)
        content, annotations = file.content, chain.from_iterable(file.annotations())
        categories = sorted(content["categories"], key=lambda category: category["id"])
        self.category_ids = [category["id"] for category in categories]
        self.classes = [category["name"] for category in categories]
        self.image_ids = [image["id"] for image in content["images"]]
        entries = [
            {"iscrowd": 0, **a, "area": object_area(a), "id": k, "file_id": a.get("id")}
            for k, a in enumerate(annotations, start=1)
        ]
        self._content = {**content, "annotations": entries}

    def ground_truth(self) -> dict[str, Any]:
        """Return the annotations in COCO's format."""
        return self._content

    def load_image(self, index: int) -> Any:
        """Return an image, (H, W, 3) uint8 RGB.

        Raises:
            DataError: there are no images, or this one cannot be read.
        """
        name = self._content["images"][index]["file_name"]
        if self._images is None:
            raise DataError(f"no image '{name}': set the folder of the images (--images).")
        return read_image(path_inside(self._images, name, self.annotation_file.name), "images")


class _Classified(_GroundTruth):
    """The images of a classifier's results file, which contains their true classes."""

    annotations = ("label",)

    def __init__(self, content: dict[str, Any]):
        self.classes, self.image_ids = content["classes"], [image["image_id"] for image in content["images"]]


class _Sentences(_GroundTruth):
    """The sentences of a results file, which contains their references."""

    noun = "sentences"

    def __init__(self, sentences: list[Any]):
        self._num_sentences = len(sentences)

    def __len__(self) -> int:
        return self._num_sentences


def score_file(
    results: str | Path, *, annotations: str | Path | None = None, images: str | Path | None = None
) -> ScoredResults:
    """Evaluate a results file without a config.

    Args:
        results: a file written by vitkit test: boxes or masks, which need `annotations`; classes; or texts.
        annotations: annotations in COCO's format.
        images: folder of the images; None: no images are shown.
    Raises:
        DataError: a file is missing, truncated or invalid, or the files are about different images.
        ConfigError: annotations are needed, or results of this kind need a config.
    """
    results = Path(results)
    content = read_results(results)
    if isinstance(content, dict) and {"images", "classes", "confusion_matrix"} <= content.keys():
        raise_issues(_classification_issues(content), results.name)
        evaluator = ClassificationEvaluator(_Classified(content))
        evaluator.load_results(results)
    elif isinstance(content, dict) and isinstance(content.get("sentences"), list) and annotations is None:
        raise_issues(sentence_issues(content, len(content["sentences"])), results.name)
        evaluator = TextEvaluator(_Sentences(content["sentences"]))
        evaluator.load_results(results)
    elif isinstance(content, list) and not any(isinstance(entry, dict) and "caption" in entry for entry in content):
        if annotations is None:
            raise ConfigError(f"{results}: contains boxes. Pass their annotations (--annotations FILE), or a config.")
        dataset = AnnotatedFile(annotations, images)
        truth = dataset.ground_truth()["annotations"]
        has_masks = bool(content) and all(isinstance(e, dict) and e.get("segmentation") for e in content)
        masks = has_masks and all(annotation.get("segmentation") for annotation in truth)
        evaluator = CocoEvaluator(dataset, iou_types=("bbox", "segm") if masks else ("bbox",))
        evaluator.load_results(results)
        _warn_of_other_boxes(evaluator, results)
    elif isinstance(content, dict) and (what := [text for keys, text in _NO_RESULTS if keys <= content.keys()]):
        raise ConfigError(
            f"{results}: {what[0]}. Expected results, a list of {{image_id, category_id, bbox, score}}, as vitkit test "
            "RUN --out results.json writes."
        )
    else:
        raise ConfigError(
            f"{results}: results of this kind need their config: vitkit test CONFIG, or vitkit compare --data CONFIG."
        )
    evaluator.compute()
    return ScoredResults(results.stem, evaluator, None, None)


def _classification_issues(content: Mapping[str, Any]) -> list[FileIssue]:
    """Check predicted classes of images, in vitkit's own result format, before they have a dataset."""
    classes, images = content["classes"], content["images"]
    if not isinstance(classes, list) or not classes or not all(map(is_name, classes)):
        return [file_issue(classes, "a list of the names of classes under 'classes'")]
    if len(set(classes)) < len(classes):
        return [file_issue(classes, "different names under 'classes'")]
    if not isinstance(images, list) or not images:
        return [file_issue(images, "a list of images that is not empty under 'images'")]
    if no_objects := object_issues(images, "images"):
        return no_objects
    entries = Entries("images", images, "entry {}".format)
    image_id = Field(lambda value: type(value) in (int, str), "a number or a text")
    return [*entries.field_issues({"image_id": image_id}), *entries.find_repeated("image_id")]


def score_with_config(
    results: str | Path, model: str, *, overrides: Sequence[str] = (), trust: bool = False
) -> ScoredResults:
    """Evaluate a results file on the validation data of a config; other arguments are those of `find_model`.

    Raises:
        ConfigError: the config's evaluator cannot load results.
        DataError: the file is missing, truncated or invalid, or is for other images.
    """
    config, weights = find_model(model, overrides=overrides, trust=trust)
    return ScoredResults(Path(results).stem, score_results(results, config, weights), config, None)


def score_results(
    results: str | Path, config: Mapping[str, Any], weights: Located | None = None, *, split: Split = "val"
) -> Any:
    """Return the config's evaluator after it has scored a results file on a split of the data.

    Args:
        weights: the model's, whose classes the data may lack; None: those of the data are the model's.
    Raises:
        ConfigError: the config's evaluator cannot load results.
        DataError: the file is missing, truncated or invalid, or is for other images.
    """
    require(config, "data.val" if split == "val" else "data", "evaluator")
    dataset = DataSettings(**config["data"]).evaluation_dataset(split, None if weights is None else weights.metadata)
    evaluator = EVALUATORS.build(config["evaluator"], dataset=dataset)
    evaluator.load_results(results)
    _warn_of_other_boxes(evaluator, results)
    evaluator.compute()
    return evaluator


def _warn_of_other_boxes(evaluator: Evaluator, results: str | Path) -> None:
    """Warn if boxes look like fractions of their image or like corners, which would only score low."""
    if not isinstance(evaluator, CocoEvaluator):
        return
    images = {image["id"]: image for image in evaluator.dataset.ground_truth()["images"]}
    boxes, limits = [np.empty((0, 4))], [np.empty((0, 2))]
    for image_id, predictions in evaluator.stored_predictions.items():
        if {"width", "height"} <= images[image_id].keys():
            boxes.append(predictions.boxes_xywh)
            size = images[image_id]["width"], images[image_id]["height"]
            limits.append(np.tile(np.array(size, np.float64), (len(predictions.boxes_xywh), 1)))
    xywh = np.concatenate(boxes)
    beyond = int((xywh[:, :2] + xywh[:, 2:] > 1.1 * np.concatenate(limits)).any(axis=1).sum())
    looks = "fractions of the image, as no number is above 1" if len(xywh) and xywh.max() <= 1 else ""
    if beyond > len(xywh) / 5:
        looks = f"corners x1, y1, x2, y2, as {beyond} of {len(xywh)} reach beyond their image by a tenth or more"
    if looks:
        logger.warning(f"results '{results}': the boxes look like {looks}; expected x, y, width, height in pixels")


def score_run(
    run: str | Path, *, overrides: Sequence[str] = (), device: str | None = None, trust: bool = False
) -> ScoredResults:
    """Return the evaluation of a run's best checkpoint; results_val.json of these weights and data is used again.

    results_val_weights.json has their checksums; without it, the results must be newer than the weights.
    Overrides of other values than data.root may change the predictions: then the file is neither used nor written.

    Raises:
        ConfigError: the folder does not contain a run.
    """
    folder = Path(run)
    if not (folder / RUN_CONFIG).is_file():
        raise ConfigError(f"'{folder}' is neither a run nor a results file. Pass one of them.")
    results, record = folder / "results_val.json", folder / "results_val_weights.json"
    config, weights = find_trained(folder, overrides=overrides, trust=trust)
    if not all(override.startswith("data.root=") for override in overrides):
        evaluator = test(config, weights, device=device, trust=trust).evaluator
    else:
        digest = file_digest(Path(weights), "sha256")  # before the evaluation, during which they may be replaced
        evaluator = None
        if results.is_file() and _came_from(results, record, Path(weights), digest):
            with suppress(DataError):  # they are of other data
                evaluator = score_results(results, config, weights)
        if evaluator is None or (record.is_file() and read_json(record).get("data") != _data_of(evaluator, config)):
            record.unlink(missing_ok=True)
            evaluator = test(config, weights, out=results, device=device, trust=trust).evaluator
            about = {"weights": Path(weights).name, "sha256": digest, "data": _data_of(evaluator, config)}
            write_text(record, json.dumps(about))
    return ScoredResults(folder.resolve().name, evaluator, config, folder)


def _data_of(evaluator: Evaluator, config: Config) -> list[Any]:
    """Return the number of samples that an evaluator has, a checksum of what lists them, and their settings."""
    return [*fingerprint(evaluator.dataset)[:2], config["data"]["val"]]


def _came_from(results: Path, record: Path, weights: Path, digest: str) -> bool:
    """Return whether results come from weights with this checksum."""
    if not record.is_file():
        return results.stat().st_mtime >= weights.stat().st_mtime
    with suppress(OSError, ValueError, AttributeError):  # a damaged record is of no weights
        return json.loads(record.read_bytes()).get("sha256") == digest
    return False


def sample_ids(scored: ScoredResults) -> list[Any]:
    """Return the ids of the images, or the indices of the sentences, of scored results."""
    return list(scored.evaluator.dataset.sample_ids())
