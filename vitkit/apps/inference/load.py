"""Find and load a model by any of its names: a zoo name, a run's folder or checkpoint, a config and its weights."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from os.path import isfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import vitkit.model_zoo as model_zoo
from vitkit.apps.export_reading.loading import (
    ExportedGenerator,
    ExportedModel,
    check_runtime,
    open_exported_model,
    trust_program,
)
from vitkit.apps.export_reading.settings import PROGRAM_SUFFIX, Runtime
from vitkit.apps.inference.language import MaskFiller, TextContinuer
from vitkit.apps.inference.predictor import Predictor
from vitkit.apps.inference.trained_classes import TrainedOn, category_ids_of, keypoints_of, read_trained_classes
from vitkit.apps.inference.translator import Translator
from vitkit.apps.inference.videos import VideoPredictor
from vitkit.apps.interop.toolboxes import is_of_toolbox, read_toolbox_config
from vitkit.apps.interop.transformers_configs import check_architecture, read_config
from vitkit.config import Config, config_names, load_config, load_saved_config
from vitkit.data.datasets.clip_sampling import ClipSampling
from vitkit.data.datasets.video import ClipDataset
from vitkit.devices import Precision, accelerators, resolve_precision
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError, ConfigError
from vitkit.io.image_files import MAX_PIXELS
from vitkit.ops.images import in_channels
from vitkit.protocols.model import child
from vitkit.registry import DATASETS, MODELS, Spec, parameters_of
from vitkit.structures import ImageSizes, KeypointInfo, ScoreThresholds
from vitkit.text.class_prompts import Prompts
from vitkit.text.vocabulary import Vocabulary, vocabularies_from_json
from vitkit.text_format import pluralize
from vitkit.weights import LoadReport, load_weights
from vitkit.weights.locate import (
    FILE_KINDS,
    MODEL_KINDS,
    RUN_CONFIG,
    USABLE_KINDS,
    Located,
    Weights,
    find_weights,
    locate,
    nothing_named,
)
from vitkit.weights.marian import TOKEN_FILES
from vitkit.weights.published import load_published_config
from vitkit.weights.tokenizer_files import BERT, TOKENIZER, find_tokenizer

Loaded = Predictor | Translator | TextContinuer | MaskFiller
"""A model that is ready to use."""


class FoundModel(NamedTuple):
    """A model's config and its weights."""

    config: Mapping[str, Any]
    weights: Located | None
    """None if there are none, as for a config by itself."""


class TrainedModel(NamedTuple):
    """The config and the weights of a model that has both."""

    config: Mapping[str, Any]
    weights: Located


def load(
    source: str | Path | Mapping[str, Any],
    weights: Weights | None = None,
    *,
    overrides: Sequence[str] = (),
    classes: Sequence[str] | None = None,
    things: Sequence[bool] | None = None,
    device: str | torch.device = "cpu",
    precision: Precision = "fp32",
    runtime: Runtime = "onnxruntime",
    trust: bool = False,
    training_queries: bool = False,
) -> Loaded:
    """Load a trained model, ready to predict, to translate, or to continue or fill text.

    Args:
        source: see `find_model`.
        weights: see `find_usable`; None: those of `source`.
        overrides: `key.sub=value` changes to the config.
        classes: names of the labels, of those that it was trained on, in any order: the others are left out of the
            model; of weights that do not name them, the names of all; None: all, see `read_trained_classes`, which are
            also what a text-prompted model looks for unless it is told otherwise. Any phrases are classes of such a
            model.
        things: for panoptic models, whether each class has instances; None: as it was trained.
        device: such as "cpu", "cuda" or "mps".
        precision: the precision of autocast, for models of images; an exported file keeps its own.
        runtime: what runs an ONNX file; OpenVINO ("openvino") only on the CPU.
        trust: let a run's saved config import the code that it names, see `load_config`, and an exported program run.
        training_queries: keep the model's queries that exist in training only; they predict nothing.
    Raises:
        ConfigError: there is no such config or run, it has no weights, or the device or the precision is unknown.
        CheckpointError: the weights cannot be read, or do not fit the model.
        DataError: the classes of a text-prompted model are not phrases.
    """
    overrides = _list_of_texts("overrides", overrides)
    classes = None if classes is None else _list_of_texts("classes", classes)
    config, located = find_trained(source, weights, overrides=overrides, trust=trust)
    device = "cpu" if device is None else device
    require_device(device)
    precision = resolve_precision(precision, torch.device(device))
    check_runtime(runtime, located, device)
    if not isinstance(config.get("model"), str | Mapping):
        where = config.path if isinstance(config, Config) else "config"
        raise ConfigError(f"{where}: model is not set, so there is nothing to load.")
    vocabularies = _read_vocabularies(config, located)
    trained = TrainedOn((), None)
    if _has_classes(config, located, vocabularies):
        trained = read_trained_classes(located.metadata, str(located), config)
        if not trained.named and classes is not None and len(classes) == len(trained.classes):
            trained = trained._replace(classes=classes)  # which are the names that they lack
        elif not trained.named and is_of_toolbox(located):
            raise CheckpointError(
                f"{located}: does not name its {pluralize(len(trained.classes), 'classes')}. Name all of them in the "
                "order of its head: classes=[NAME, ...] of vitkit.load, or vitkit convert --classes NAME,NAME,... --to "
                "vitkit, which writes them into a file."
            )
        _check_chosen(classes, trained)
        classes = trained.classes if classes is None else classes
        things = trained.pick(trained.things, classes) if things is None else things
        _check_things(str(located if isinstance(source, Mapping) else source), config, things)
    spec = config["model"]
    if isinstance(spec, Mapping) and not training_queries:
        spec = {name: value for name, value in spec.items() if name != "training_queries"}
    keypoints = keypoints_of(located.metadata, str(located))
    built = build_model(spec, classes=classes, things=things, keypoints=keypoints, vocabularies=vocabularies)
    stated = located.metadata.get("classes") if located.kind == "exported" and built.class_head else None
    if stated and classes is not None and list(classes) != list(stated):
        raise ConfigError(
            f"{located}: an exported file keeps its {pluralize(len(stated), 'classes')}, {', '.join(stated)[:200]}; "
            "got others. Leave classes out, or export a model of those (vitkit convert RUN --classes NAME,NAME)."
        )
    opened = open_weights(built, located, classes=classes, trained=trained.classes, spec=spec, runtime=runtime)
    model, report = opened[0].to(device), opened[1]
    if "source" in vocabularies:
        return Translator(model, vocabularies, report=report)
    if "masked_tokens" in model.returns:
        return MaskFiller(model, vocabularies, report=report)
    if "tokens" in model.takes:
        return TextContinuer(model, vocabularies, report=report)
    return _predictor_of(model, config, located, classes or (), trained, keypoints, precision=precision, report=report)


def find_trained(
    source: str | Path | Mapping[str, Any],
    weights: Weights | None = None,
    *,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> TrainedModel:
    """Find a model that has weights; arguments and other errors are those of `find_model`.

    Raises:
        ConfigError: the model has no weights.
    """
    config, located = find_model(source, weights, overrides=overrides, trust=trust)
    if located is None:
        name = (source.path if isinstance(source, Config) else "the config") if isinstance(source, Mapping) else source
        raise ConfigError(f"{name}: a config has no weights. Give a checkpoint, or the folder of a run in its place.")
    return TrainedModel(config, located)


def find_model(
    source: str | Path | Mapping[str, Any],
    weights: Weights | None = None,
    *,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> FoundModel:
    """Find the config and the weights of a model, however it is named.

    Args:
        source: a config that was loaded before, or one of the following, see `vitkit.weights.locate` for their order:
            the folder of a run, or one of its checkpoint and the files beside it;
            a config file (.py, or .json as saved), or any other file: a run's checkpoint or an exported model
                (.onnx, .pt2), which hold their config;
            a name of the model zoo, such as "shapes_dino", whose weights are in the package, or "detr_r50", whose
            weights are downloaded once;
            a folder of the transformers library, or "hf:OWNER/NAME", a repository of its hub, downloaded once;
            the name of an installed config, such as "quickstart/detr", or a family with arguments,
                "mask2former:backbone=swin_tiny,data=ade20k".
            A folder with the name of an installed config is written as a path, "./detr_r50".
        weights: see `find_usable`; None: those of `source`, if it has any.
        overrides: `key.sub=value` changes to the config.
        trust: let a run's saved config import the code that it names, see `load_config`, and an exported program run.
    Raises:
        ConfigError: there is no such model, or its config is wrong.
        CheckpointError: the checkpoint cannot be read, or holds no config.
    """
    if isinstance(source, Mapping):
        return FoundModel(source, None if weights is None else find_usable(weights, trust=trust))
    model = _locate_model(source)
    if model.kind == "config":
        config = load_config(Path(source), overrides, trust=trust)  # its errors before any weights are downloaded
        return FoundModel(config, None if weights is None else find_usable(weights, trust=trust))
    if weights is not None and model.kind in FILE_KINDS:
        raise ConfigError(
            f"{source}: is not a config, and has its own weights; got also {str(weights)!r}. Give one of the two."
        )
    located = find_usable(model if weights is None else weights, trust=trust)
    return FoundModel(_config_of(model, overrides, trust), located)


def _locate_model(source: str | Path) -> Located:
    """Locate a model.

    Raises:
        ConfigError: there is none of that name.
    """
    located = locate(source, MODEL_KINDS)
    if located is None:
        config = "a config (a file that ends in .py, or an installed one's name)"
        names = {*model_zoo.index(), *config_names()}
        raise ConfigError(nothing_named(str(source), names, "an exported file", config))
    return located


def find_usable(weights: Weights, *, trust: bool = False) -> Located:
    """Find the weights, see `find_weights`, or the exported file that a model is used with.

    Args:
        trust: let an exported program run.
    Raises:
        ConfigError: there are no such weights, or vitkit has no model of the repository's kind.
        CheckpointError: the repository cannot be downloaded.
    """
    located = find_weights(weights, USABLE_KINDS, check=check_architecture)
    if trust and located.kind == "exported" and located.path.suffix == PROGRAM_SUFFIX and isfile(located.path):
        trust_program(located.path)
    return located


_IN_EXPORTED_FILES = tuple(
    f"model.{name}"
    for name in ("type", "backbone", "neck", "head", "num_queries", "num_classes", "num_layers", "d_model")
)
"""Beginnings of the keys of what an exported file computes; others belong to the processing of its outputs."""


def _config_of(model: Located, overrides: Sequence[str], trust: bool) -> Config:
    """Load the config of a located model.

    Raises:
        CheckpointError: the checkpoint cannot be read, or holds no config.
        ConfigError: the config is wrong, or its changes do not apply to an exported file.
    """
    if model.kind in ("hub", "library"):
        return read_config(model, overrides, trust=trust)
    # A checkpoint that was copied without the run's config has it as well.
    if model.kind == "run" and isfile(Path(model.name) / RUN_CONFIG):
        return load_config(Path(model.name) / RUN_CONFIG, overrides, trust=trust)
    if model.kind == "published":
        return load_published_config(model.name, overrides)
    keys = (text.partition("=")[0].strip() for text in overrides)
    fixed = [key for key in keys if key == "model" or key.startswith(_IN_EXPORTED_FILES)]
    if fixed and model.kind == "exported":
        raise ConfigError(
            f"{model}: is an exported file, whose model cannot be changed by {fixed[0]}=…. Leave that out, or "
            "export the changed model."
        )
    config = model.metadata.get("config")
    if not isinstance(config, str) and (found := read_toolbox_config(model, overrides, trust=trust)) is not None:
        return found
    if not isinstance(config, str):
        raise CheckpointError(
            f"{model}: has no config, unlike a run's checkpoint, so its model is not known. Give its config as well: "
            f"CONFIG {model}."
        )
    return load_saved_config(config, model.path, overrides, trust=trust)


def require_device(device: str | torch.device) -> None:
    """Check that PyTorch can compute on a device here.

    Raises:
        ConfigError: it cannot.
    """
    choices = ["cpu", *accelerators()]
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):  # no device has such a name
        parsed = None
    if (
        parsed is None
        or parsed.type not in (*choices, "meta")
        or (parsed.index and parsed.index >= torch.accelerator.device_count())
    ):
        raise ConfigError(f"device={device}: PyTorch finds no such device here; expected {' or '.join(choices)}.")


def _read_vocabularies(config: Mapping[str, Any], weights: Located) -> dict[str, Vocabulary]:
    """Return the vocabularies that weights were trained with, or the tokenizer that the config's model names."""
    vocabularies = vocabularies_from_json(weights.metadata.get("vocabularies") or {}, str(weights))
    tokenizer = _section(config, "model").get("tokenizer")
    return {"target": find_tokenizer(tokenizer)} if tokenizer and not vocabularies else vocabularies


def _has_classes(config: Mapping[str, Any], weights: Located, vocabularies: Mapping[str, Vocabulary]) -> bool:
    """Whether a config's model predicts classes, also those of a prompt.

    Raises:
        CheckpointError: the model reads text, and there is no vocabulary for it.
    """
    constructor, _ = MODELS.resolve(config["model"], "model")
    takes, returns = (getattr(constructor, name, ()) for name in ("takes", "returns"))
    if "features" in returns or (vocabularies and "text" not in takes):
        return False
    if vocabularies or not {"target_vocabulary", "tokenizer"} & parameters_of(constructor).keys():
        return True
    if "text" in takes:
        raise CheckpointError(
            f"{weights}: has no vocabulary to read text with, and model.tokenizer is not set. Set it to {BERT}, or to "
            "the folder of its files."
        )
    raise CheckpointError(
        f"{weights}: has no vocabularies. Expected a checkpoint that was trained on text, or a folder of the "
        f"transformers library with {', '.join(TOKEN_FILES)} (Marian) or {TOKENIZER} (BERT, GPT-2; needs pip install "
        "'vitkit[text]'). For token ids only, build the model (vitkit.apps.inference.find_model) and load its weights "
        "(load_weights)."
    )


def _check_things(name: str, config: Mapping[str, Any], things: Sequence[bool] | None) -> None:
    """Check that the things of a panoptic model are known.

    Raises:
        ConfigError: it is unknown which classes have instances.
    """
    model = _section(config, "model")
    if things is None and model.get("things") is None and "panoptic" in model.get("tasks", ()):
        raise ConfigError(
            f"{name}: does not state which classes are things, that is, have instances, which panoptic segmentation "
            "needs. Give things=[True, ...], one for each class, or set model.tasks=['semantic']."
        )


def open_weights(
    model: nn.Module,
    weights: Located,
    *,
    classes: Sequence[str] | None,
    trained: Sequence[str] | None = None,
    spec: Spec,
    runtime: Runtime = "onnxruntime",
) -> tuple[Any, LoadReport]:
    """Load located weights into the model that their config builds; return the model, or an exported file in its place,
    and what was loaded.

    Args:
        classes, spec: see `load_weights`.
        trained: the classes of weights that do not name them.
        runtime: what runs an ONNX file.
    Raises:
        CheckpointError, ConfigError: see `load_weights`, `open_exported_model`.
    """
    if weights.kind == "exported":
        return open_exported_model(weights.path, model, runtime), LoadReport(str(weights))
    return model, load_weights(model, weights, classes=classes, trained_classes=trained, spec=spec)


def _predictor_of(
    model: Any,
    config: Mapping[str, Any],
    weights: Located,
    classes: Sequence[str],
    trained: TrainedOn,
    keypoints: KeypointInfo | None,
    *,
    precision: Precision,
    report: LoadReport,
) -> Predictor:
    """Return the predictor of a model of images or clips, set up by its config and its weights."""
    settings = dict(
        transforms=_section(config, "data", "val").get("transforms"),
        precision=precision,
        max_image_pixels=_section(config, "data").get("max_image_pixels", MAX_PIXELS),
        report=report,
    )
    sampling = read_sampling(_section(config, "data").get("val"))
    if sampling is not None:
        return VideoPredictor(model, classes, sampling=sampling, **settings)
    return Predictor(
        model,
        classes,
        **settings,
        category_ids=trained.pick(category_ids_of(weights.metadata, str(weights), trained.classes), classes),
        keypoint_info=keypoints,
        channels=_channels(config, model),
        text=_phrases(config, classes) if "text" in model.takes and classes else None,
        **_read_measured(weights.metadata, str(weights), classes),
    )


def read_sampling(spec: Any) -> ClipSampling | None:
    """Return the sampling in a dataset's spec, with one clip and no jitter; None if it is not a dataset of videos."""
    if not isinstance(spec, str | Mapping):
        return None
    constructor, arguments = DATASETS.resolve(spec)
    if not (isinstance(constructor, type) and issubclass(constructor, ClipDataset)):
        return None
    # A dataset without this argument has all frames of its videos in a clip.
    values: dict[str, Any] = {"sampling_rate": 1}
    values |= {name: parameter.default for name, parameter in parameters_of(constructor).items()}
    values |= arguments | {"num_clips": 1, "temporal_jitter": False, "on_short": "pad"}
    names = [field.name for field in fields(ClipSampling)]
    return ClipSampling(**{name: values[name] for name in names if name in values})


def _channels(config: Mapping[str, Any], model: nn.Module) -> int | None:
    """Return the number of channels that images are read with; None for RGB of 8 bits."""
    backbone = child(model, "backbone")
    if isinstance(model, ExportedModel):
        backbone = child(model.model, "backbone")
    channels = None if backbone is None else in_channels(backbone)
    stated: int | None = _section(config, "data").get("channels", None if channels == 3 else channels)
    return stated


def _phrases(config: Mapping[str, Any], classes: Sequence[str]) -> list[str]:
    """Return the phrase of each class in the prompts that a text-prompted model was trained with."""
    return Prompts(**_section(config, "data", "prompts")).class_phrases(classes)


def _read_measured(checkpoint: Mapping[str, Any], name: str, classes: Sequence[str]) -> dict[str, Any]:
    """Return the score thresholds and image sizes that a run's evaluation measured, as arguments of `Predictor`."""
    measured = checkpoint.get("measured") or {}
    try:
        thresholds, sizes = measured.get("score_thresholds"), measured.get("image_sizes")
        return {
            "thresholds": None if thresholds is None else ScoreThresholds.from_json(thresholds, classes),
            "image_sizes": None if sizes is None else ImageSizes.from_json(sizes),
        }
    except (AttributeError, ValueError) as error:
        raise CheckpointError(f"{name}: damaged: what its evaluation has measured cannot be read ({error}).") from error


def _section(config: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return the mapping below the keys; empty if there is none, or a plain name in its place."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def is_config_only(source: str | Path) -> bool:
    """Whether a name by itself gives no weights: it is that of a config, or there is no such file or model."""
    located = locate(source, MODEL_KINDS)
    return located is None or located.kind == "config" or (located.kind in FILE_KINDS and not isfile(source))


def check_not_exported(loaded: Loaded, what: str) -> None:
    """Check that a model is not an exported file, which only returns the model's outputs.

    Args:
        what: the beginning of the message, such as the name of a command.
    Raises:
        ConfigError: it is one.
    """
    model = loaded.model
    if isinstance(model, ExportedModel | ExportedGenerator):
        path = model.file.path if isinstance(model, ExportedModel) else model.encoder.path
        raise ConfigError(
            f"{what}: {path} is an exported file, which only returns the model's outputs. Give the checkpoint that it "
            "was exported from."
        )


def _check_chosen(classes: Sequence[str] | None, trained: TrainedOn) -> None:
    """Raise a ConfigError if no class is chosen of those that the weights name, or one twice."""
    if classes is None or not trained.named:  # names of rows may be the same, as of ImageNet's two cranes
        return
    if not classes:
        raise ConfigError("classes: is empty; expected at least one name.")
    if repeated := [name for name, count in Counter(classes).items() if count > 1]:
        raise ConfigError(f"classes: {repeated[0]!r} is listed twice. Name each once.")


def _list_of_texts(name: str, values: Iterable[str]) -> list[str]:
    """Return a list of texts; raise a ConfigError for a text, whose letters would be these, and for other values."""
    if isinstance(values, str):
        raise ConfigError(f"{name}: got the text {values!r}; expected a list of texts, such as {values.split(',')}.")
    values = list(values)
    if strange := [value for value in values if not isinstance(value, str)]:
        raise ConfigError(f"{name}: has {strange[0]!r}; expected a list of texts.")
    return values
