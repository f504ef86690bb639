"""Files of an evaluator's predictions: written by `vitkit test`, and read in place of running the model.

Predictions of boxes, masks, keypoints, segments and captions have COCO's result formats, those of classes and texts
vitkit's own; maps are PNG files, see result_maps.py. An evaluator's own `write_results` and `load_results` go first.
"""

import json
import logging
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask
from torch import Tensor

from vitkit.apps.output import write_text
from vitkit.apps.training.result_checks import caption_result_issues, result_issues, sentence_issues
from vitkit.apps.training.result_maps import load_panoptic, load_semantic, read_results, write_panoptic, write_semantic
from vitkit.apps.visualization.metrics import draw_by_length, draw_confusion_matrix
from vitkit.errors import DataError
from vitkit.evaluation import keypoints
from vitkit.evaluation.captions import CaptionEvaluator
from vitkit.evaluation.classification import NUM_BEST, ClassificationEvaluator, StoredClasses
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.evaluation.combined import CombinedEvaluator
from vitkit.evaluation.detection_matches import Predictions
from vitkit.evaluation.panoptic import PanopticEvaluator
from vitkit.evaluation.semantic import SemanticEvaluator
from vitkit.evaluation.text import LanguageModelEvaluator, StoredText, TextEvaluator
from vitkit.io.coco_schema import is_number, raise_issues
from vitkit.io.segmentations import encode_segmentation
from vitkit.protocols.evaluator import Evaluator

logger = logging.getLogger("vitkit")


def write_results(evaluator: Evaluator, path: str | Path) -> list[Path]:
    """Write an evaluator's predictions, and their metrics where the format has room for them, after `compute`.

    Returns:
        the files and folders: `path`, and others beside it.
    Raises:
        ConfigError: the evaluator does not write its predictions.
        DataError: a file cannot be written.
    """
    return _find_function(evaluator, "write_results")(evaluator, Path(path)) or [Path(path)]


def load_results(evaluator: Evaluator, path: str | Path) -> None:
    """Read predictions that were written earlier, in place of an evaluator's `update`.

    Args:
        path: the results file; of maps, also their folder.
    Raises:
        ConfigError: the evaluator does not read its predictions.
        DataError: a file is missing or invalid, or is for other images, sentences or classes.
    """
    _find_function(evaluator, "load_results")(evaluator, path)


def writes_results(evaluator: Evaluator) -> bool:
    """Return whether an evaluator's predictions can be written."""
    return _find_function(evaluator, "write_results") is not Evaluator.write_results


def _find_function(evaluator: Evaluator, name: str) -> Callable[..., Any]:
    """Return the method of this name, or the function that `_FORMATS` has in its place, of the first class with one."""
    functions = (vars(cls).get(name, _FORMATS.get(cls, {}).get(name)) for cls in type(evaluator).__mro__)
    return next(function for function in functions if function is not None)


def _write_coco(evaluator: CocoEvaluator, path: Path) -> None:
    """Write `results()` as JSON, which pycocotools' `loadRes` and COCO's server read."""
    write_text(path, json.dumps(evaluator.results()))


def _load_coco(evaluator: CocoEvaluator, path: str | Path) -> None:
    has_masks, has_points = "segm" in evaluator.iou_types, "keypoints" in evaluator.iou_types
    image_ids = {int(image_id) for image_id in evaluator.dataset.image_ids}
    results = read_results(path)
    if isinstance(results, list):
        ids = (entry.get("image_id") for entry in results if isinstance(entry, dict))
        _check_image_ids(ids, image_ids, Path(path).name)
    category_ids = {int(category_id) for category_id in evaluator.dataset.category_ids}
    num_keypoints = len(evaluator.dataset.keypoints.names) if has_points else None
    issues = result_issues(results, image_ids, category_ids, masks=has_masks, num_keypoints=num_keypoints)
    raise_issues(issues, f"results '{path}'")
    evaluator.image_matches.clear()
    by_image: dict[int, list[dict[str, Any]]] = {}
    for result in results:
        by_image.setdefault(result["image_id"], []).append(result)
    if num_empty := len(image_ids - by_image.keys()):
        logger.warning(
            "results '%s': no prediction for %d of %d images, whose objects count as missed",
            path, num_empty, len(image_ids),
        )  # fmt: skip
    for image_id, image_results in by_image.items():
        masks = None
        if has_masks:
            encoded = (result["segmentation"] for result in image_results)
            masks = [encode_segmentation(mask, *mask["size"]) for mask in encoded]
        points = None
        if has_points:
            points = np.array([result["keypoints"] for result in image_results], np.float64)
            points = points.reshape(len(image_results), -1, 3)
        shown = coco_mask.toBbox(masks) if points is None and masks else points
        shown = keypoints.boxes_around_points(points) if points is not None else shown
        boxes = [
            result["bbox"] if "bbox" in result else shown[position].tolist()
            for position, result in enumerate(image_results)
        ]
        evaluator.stored_predictions[image_id] = Predictions(
            np.array([result["category_id"] for result in image_results], np.int64),
            np.array(boxes, np.float64),
            np.array([result["score"] for result in image_results], np.float64),
            masks,
            points,
        )


def _check_image_ids(results: Iterable[Any], dataset: Iterable[Any], name: str) -> None:
    """Check that results are for a dataset's images.

    Raises:
        DataError: some are not; the error says how many match.
    """
    theirs = {x for x in results if type(x) in (int, str)}
    ours = {int(x) if isinstance(x, np.integer | Tensor) else x for x in dataset}
    matching = len(theirs & ours)
    if matching < len(theirs):
        raise DataError(
            f"results '{name}': {matching} of their {len(theirs)} images are among the {len(ours)} of the data, not "
            f"{reprlib.repr(min(theirs - ours, key=str))}. Pass results for the same images."
        )


def _write_captions(evaluator: CaptionEvaluator, path: Path) -> None:
    """Write the captions in COCO's results format, a list of image_id and caption, which other tools also evaluate."""
    results = [
        {"image_id": int(image_id), "caption": evaluator.stored_predictions[image_id]}  # ids may be NumPy integers
        for image_id in evaluator.dataset.image_ids
        if image_id in evaluator.stored_predictions
    ]
    write_text(path, json.dumps(results, ensure_ascii=False))


def _load_captions(evaluator: CaptionEvaluator, path: str | Path) -> None:
    results = read_results(path)
    image_ids = {int(image_id) for image_id in evaluator.dataset.image_ids}
    raise_issues(caption_result_issues(results, image_ids), f"results '{path}'")
    evaluator.stored_predictions |= {entry["image_id"]: entry["caption"] for entry in results}


def _write_classes(evaluator: ClassificationEvaluator, path: Path) -> list[Path]:
    """Write metrics, confusion matrix and each image's best classes as JSON, and the matrix as a figure.

    Returns:
        the files: `path`, and NAME_confusion.png for NAME.json.
    """
    names, matrix = evaluator.dataset.classes, evaluator.confusion_matrix()
    images = [
        {
            "image_id": image_id,
            "class": names[prediction.label],
            "predicted": [names[label] for label in prediction.best],
            "scores": prediction.scores,
        }
        for image_id, prediction in evaluator.stored_predictions.items()
    ]
    result = {**evaluator.metrics, "classes": list(names), "confusion_matrix": matrix.tolist(), "images": images}
    write_text(path, json.dumps(result))
    figure = path.with_name(f"{path.stem}_confusion.png")
    draw_confusion_matrix(matrix, names, figure, what=evaluator.dataset.noun)
    return [path, figure]


def _load_classes(evaluator: ClassificationEvaluator, path: str | Path) -> None:
    content = read_results(path)
    label_of = {name: label for label, name in enumerate(evaluator.dataset.classes)}
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list):
        raise DataError(f"results '{path}': expected classes that vitkit test wrote, {{'images': [{{...}}, ...]}}.")
    dataset_ids = set(np.asarray(evaluator.dataset.image_ids).tolist())
    for number, image in enumerate(images):
        prediction = _classes_of(image, label_of)
        if prediction is None:
            raise DataError(
                f"results '{path}': image {number} has no image_id, or no class, predicted classes and scores of "
                f"the dataset's {len(label_of)} classes. Give results of the config's data.val."
            )
        if image["image_id"] not in dataset_ids:
            every_id = [other.get("image_id") for other in images if isinstance(other, dict)]
            matching = sum(isinstance(other, int | str) and other in dataset_ids for other in every_id)
            raise DataError(
                f"results '{path}': {matching} of their {len(images)} images are among the "
                f"{len(dataset_ids)} of the data. Give results of the same images."
            )
        evaluator.stored_predictions[image["image_id"]] = prediction


def _classes_of(image: Any, label_of: Mapping[str, int]) -> StoredClasses | None:
    """Return the prediction in an entry of a results file, or None if the entry is invalid."""
    if not isinstance(image, dict) or not isinstance(image.get("image_id"), int | str):
        return None
    names, scores = image.get("predicted"), image.get("scores")
    count = min(NUM_BEST, len(label_of))
    if not (isinstance(names, list) and isinstance(scores, list) and len(names) == len(scores) == count):
        return None
    if not all(isinstance(name, str) and name in label_of for name in (image.get("class"), *names)):
        return None
    if not all(is_number(score) for score in scores):
        return None
    return StoredClasses(label_of[image["class"]], [label_of[name] for name in names], scores)


def _write_texts(evaluator: TextEvaluator, path: Path) -> list[Path]:
    """Write metrics and texts as JSON, only the texts, one per line, and the first metric by length as a figure.

    Returns:
        the files: `path`, NAME.txt and NAME_by_length.png for NAME.json.
    """
    sentences = [{"index": index, **sentence._asdict()} for index, sentence in evaluator.stored_predictions.items()]
    groups = evaluator.by_length()
    by_length = [
        {"first": group.min_words, "last": group.max_words, "count": group.count, evaluator.reported[0]: group.score}
        for group in groups
    ]
    result = {**evaluator.metrics, "signatures": evaluator.signatures, "by_length": by_length, "sentences": sentences}
    write_text(path, json.dumps(result, ensure_ascii=False, indent=1))
    texts, figure = path.with_suffix(".txt"), path.with_name(f"{path.stem}_by_length.png")
    write_text(texts, "".join(f"{sentence.text}\n" for sentence in evaluator.stored_predictions.values()))
    draw_by_length({path.stem: groups}, figure, metric=evaluator.per_class_metric)
    return [path, texts, figure]


def _load_texts(evaluator: TextEvaluator, path: str | Path) -> None:
    content = read_results(path)
    raise_issues(sentence_issues(content, len(evaluator.dataset)), f"results '{path}'")
    evaluator.stored_predictions = {
        row["index"]: StoredText(row["text"], row["source"], row["references"]) for row in content["sentences"]
    }


def _write_likelihoods(evaluator: LanguageModelEvaluator, path: Path) -> None:
    """Write the metrics, and each sentence's tokens, correct tokens and log likelihood, as JSON, with null for
    infinite values."""
    sentences = [{"index": index, **sentence._asdict()} for index, sentence in evaluator.stored_predictions.items()]
    metrics = {name: value if math.isfinite(value) else None for name, value in evaluator.metrics.items()}
    write_text(path, json.dumps({**metrics, "sentences": sentences}))


def _write_each(evaluator: CombinedEvaluator, path: Path) -> list[Path]:
    """Write each evaluator's results.

    Returns:
        the files: the first's `path`, the others' NAME_EVALUATOR.json beside it (NAME_EVALUATOR2.json and so on, if
        there are several of a kind), and any other files that the evaluators write.
    """
    return [written for part, file in _files_of_parts(evaluator, path) for written in write_results(part, file)]


def _load_each(evaluator: CombinedEvaluator, path: str | Path) -> None:
    for part, file in _files_of_parts(evaluator, Path(path)):
        load_results(part, file)


def _files_of_parts(evaluator: CombinedEvaluator, path: Path) -> list[tuple[Evaluator, Path]]:
    names = [type(part).__name__ for part in evaluator.parts]
    # The second and later evaluators of a kind are numbered.
    numbers = [names[1:k].count(name) + 1 for k, name in enumerate(names)]
    suffixes = [f"{name}{number if number > 1 else ''}" for name, number in zip(names, numbers)]
    files = [path, *(path.with_name(f"{path.stem}_{suffix}.json") for suffix in suffixes[1:])]
    return list(zip(evaluator.parts, files))


_FORMATS: dict[type, dict[str, Callable[..., Any]]] = {
    CocoEvaluator: dict(write_results=_write_coco, load_results=_load_coco),
    PanopticEvaluator: dict(write_results=write_panoptic, load_results=load_panoptic),
    SemanticEvaluator: dict(write_results=write_semantic, load_results=load_semantic),
    ClassificationEvaluator: dict(write_results=_write_classes, load_results=_load_classes),
    CaptionEvaluator: dict(write_results=_write_captions, load_results=_load_captions),
    TextEvaluator: dict(write_results=_write_texts, load_results=_load_texts),
    LanguageModelEvaluator: dict(write_results=_write_likelihoods),
    CombinedEvaluator: dict(write_results=_write_each, load_results=_load_each),
}
"""Evaluator -> what writes and reads its predictions, and those of its subclasses."""
