"""Model cards: the README.md that describes a model where it is published, and the metrics that `vitkit test` saves."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCardData

from vitkit import __version__, model_zoo
from vitkit.apps.inference.language import LanguageModel, MaskFiller
from vitkit.apps.inference.load import Loaded, find_usable
from vitkit.apps.inference.predictor import Predictor
from vitkit.errors import DataError
from vitkit.io.local_cache import file_digest
from vitkit.io.output import write_text
from vitkit.protocols.evaluator import is_measured
from vitkit.text_format import pluralize
from vitkit.weights.locate import Weights, find_weights

CARD = "README.md"
WRITTEN = "written by vitkit"
"""Words by which a card is known as one of vitkit's."""
METRICS = "metrics.json"
"""The file that `vitkit test` writes into a run's folder; names of further ones also begin or end with it."""
LICENSES = (
    *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "mpl-2.0", "gpl-3.0", "lgpl-3.0", "agpl-3.0", "unknown"),
    *("cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0"),
)
"""Names of licenses that the Hub knows; another one is "other", with its name."""
_MAX_CLASSES = 100


class Measured(NamedTuple):
    """Metrics of a model on one split of a dataset."""

    data: str
    """The dataset's name."""
    split: str
    options: Mapping[str, Any]
    """How the images were predicted, if not in the usual way, such as the size of tiles."""
    metrics: Mapping[str, float]


def save_metrics(path: Path, measured: Measured, weights: Weights) -> None:
    """Write metrics as JSON, with the checksum of the weights' file, by which `read_metrics` knows whose they are.

    Raises:
        DataError: the file cannot be written.
    """
    digest = file_digest(Path(weights), "sha256") if Path(weights).is_file() else None
    content = {"vitkit": __version__, "weights": str(weights), "sha256": digest, **measured._asdict()}
    content["metrics"] = {name: value if is_measured(value) else None for name, value in measured.metrics.items()}
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_metrics(weights: Weights) -> list[Measured]:
    """Return the metrics of weights: those that `vitkit test` has saved beside them, the newest of each split, or those
    that the model zoo lists as measured.

    Raises:
        DataError: a file of their metrics is damaged.
    """
    path, entry = Path(weights), zoo_entry(weights)
    if "measured" in entry:
        return [Measured(entry["dataset"], "val", {}, entry["measured"])]
    if not path.is_file():
        return []
    found: dict[str, Measured] = {}
    files = sorted(filter(Path.is_file, path.parent.glob("*metrics*.json")), key=lambda file: file.stat().st_mtime)
    digest = file_digest(path, "sha256") if files else None
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):  # another tool's file of that name, which may be of any format
            continue
        if not (isinstance(content, dict) and "vitkit" in content and content.get("sha256") == digest):
            continue
        try:
            metrics = {name: float(value) for name, value in content["metrics"].items() if value is not None}
            found[content["split"]] = Measured(content["data"], content["split"], content["options"], metrics)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(
                f"{file}: is not a file of metrics ({type(error).__name__}: {error}); expected what `vitkit test` "
                "writes. Remove it, or evaluate the model again."
            ) from error
    return list(found.values())


def zoo_entry(weights: Weights) -> Mapping[str, Any]:
    """Return the model zoo's entry of weights; empty for others, such as those fine-tuned from them."""
    return model_zoo.index().get(find_weights(weights).zoo_name, {})


def data_name(config: Mapping[str, Any]) -> str:
    """Return the name of a config's validation data: the name of their folder or, without one, of their class; "" for a
    config without data."""
    data = config.get("data") or {}
    val = data.get("val") or {}
    for path in (data.get("root"), val.get("images"), val.get("annotations"), val.get("folder")):
        if isinstance(path, str | Path) and "{root}" not in str(path) and Path(path).stem:
            return Path(path).stem
    return str(val.get("type", ""))


def training_data_name(config: Mapping[str, Any], weights: Weights) -> str:
    """Return the name of the data that weights were trained on; "" if it is not known, as for other projects' folders,
    whose config has the data section of a related one."""
    entry = zoo_entry(weights)
    if entry:
        return str(entry["dataset"])
    return data_name(config) if Path(weights).is_file() and "progress" in find_usable(weights).metadata else ""


def task_of(loaded: Loaded) -> str:
    """Return the Hub's name of a model's task."""
    if isinstance(loaded, MaskFiller):
        return "fill-mask"
    if isinstance(loaded, LanguageModel):
        return "text-generation"
    if not isinstance(loaded, Predictor):
        return "translation"
    returns = set(loaded.model.returns)
    if "text" in returns:
        return "image-to-text"
    if "text" in loaded.model.takes:
        return "zero-shot-object-detection"
    if "features" in returns:
        return "image-feature-extraction"
    if "class_scores" in returns:
        return "image-classification" if loaded.sampling is None else "video-classification"
    if "keypoints" in returns:
        return "keypoint-detection"
    return "image-segmentation" if returns & {"masks", "panoptic", "semantic"} else "object-detection"


def card_path(folder: Path, name: str) -> Path:
    """Return the path of a model's card in a folder: README.md, or NAME.README.md if that is something else's."""
    path = folder / CARD
    if not path.exists():
        return path
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    is_own = f"\n# {name}\n" in text and WRITTEN in text
    return path if is_own else folder / f"{name}.{CARD}"


def make_card(
    loaded: Loaded,
    config: Mapping[str, Any],
    weights: Weights,
    *,
    name: str,
    license: str | None,
    library: str,
    usage: str,
    measured: Sequence[Measured],
) -> str:
    """Return a model card: metadata in YAML, a description, how to load the model, its classes, metrics and license.

    Args:
        config: the config that the model was built from.
        weights: what it was loaded from: its file, or a name of the model zoo.
        name: the model's name.
        license: license of the weights; None: the one that the model zoo lists, or not stated.
        library: the library that reads the files.
        usage: how to load the files, in Markdown.
        measured: see `read_metrics`.
    """
    task, entry = task_of(loaded), zoo_entry(weights)
    license = license or entry.get("license")
    data = training_data_name(config, weights)
    results = [
        EvalResult(
            task_type=task,
            dataset_type=_identifier(each.data),
            dataset_name=each.data,
            dataset_split=each.split,
            metric_type=metric,
            metric_name=metric,
            metric_value=round(value, 4),
            metric_args=dict(each.options) or None,
        )
        for each in measured
        for metric, value in each.metrics.items()
        if is_measured(value)
    ]
    kind = type(loaded.model).__name__
    metadata = ModelCardData(
        model_name=name,
        library_name=library,
        pipeline_tag=task,
        tags=["vitkit", kind.lower()],
        datasets=[_identifier(data)] if data else None,
        eval_results=results or None,
        **_license_fields(license),
    )
    about = f"{kind}{f', trained on {data}' if data else ''}; {WRITTEN} {__version__}."
    parts = [f"---\n{metadata.to_yaml()}\n---", f"# {name}", about, "## Use", usage, *_classes(loaded)]
    parts += ["## Metrics", _metrics(measured, entry), "## License"]
    parts.append(license or "The license of the weights is not stated.")
    return "\n\n".join(parts) + "\n"


def _identifier(name: str) -> str:
    """Return a name in the form of the Hub's identifiers: "COCO 2017" -> "coco-2017"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"


def _license_fields(license: str | None) -> dict[str, str]:
    if license is None or license.lower() in LICENSES:
        return {} if license is None else {"license": license.lower()}
    return {"license": "other", "license_name": _identifier(license)}


def _classes(loaded: Loaded) -> list[str]:
    """Return a section with the names of the classes; nothing for a model without classes."""
    classes = loaded.classes if isinstance(loaded, Predictor) else ()
    if not classes:
        return []
    more = f", and {len(classes) - _MAX_CLASSES} more" if len(classes) > _MAX_CLASSES else ""
    return [f"## {pluralize(len(classes), 'classes')}", ", ".join(classes[:_MAX_CLASSES]) + more]


def _metrics(measured: Sequence[Measured], entry: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for each in measured:
        how = "".join(f", {key} {value}" for key, value in each.options.items())
        values = {name: value for name, value in each.metrics.items() if is_measured(value)}
        lines += [f"| {each.data} | {each.split}{how} | {name} | {value:.4g} |" for name, value in values.items()]
    if lines:
        lines = ["| data | split | metric | value |", "|---|---|---|--:|", *lines]
    if entry.get("published"):
        figures = ", ".join(f"{name} {value}" for name, value in entry["published"].items())
        lines += ["", f"Published, not measured here: {figures} ({entry['published_in']})."]
    return "\n".join(lines).strip() or "None measured: `vitkit test` on the run saves them, and a new card has them."
