"""Find and load a model by any of its names: a zoo name, a run's folder or checkpoint, a config and its weights."""

from collections.abc import Mapping, Sequence
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import vitkit.model_zoo as model_zoo
from vitkit.apps.exported.loading import (
    ExportedGenerator,
    ExportedModel,
    check_runtime,
    is_exported,
    open_exported_model,
    read_as_checkpoint,
    trust_program,
)
from vitkit.apps.exported.settings import PROGRAM_SUFFIX, Runtime
from vitkit.apps.inference.language import MaskFiller, TextContinuer
from vitkit.apps.inference.predictor import Predictor
from vitkit.apps.inference.trained_classes import category_ids_of, read_trained_classes
from vitkit.apps.inference.translator import Translator
from vitkit.apps.inference.videos import VideoPredictor
from vitkit.apps.interop.transformers_configs import read_config, transformers_folder
from vitkit.config import Config, config_names, find_config, load_config, load_saved_config
from vitkit.config.names import CONFIG_SUFFIXES, check_unambiguous, has_arguments
from vitkit.data.datasets.video import read_sampling
from vitkit.devices import Precision, require_device, resolve_precision
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError, ConfigError
from vitkit.io.image_files import MAX_PIXELS
from vitkit.ops.images import in_channels
from vitkit.protocols.model import child
from vitkit.registry import MODELS, parameters_of, unknown
from vitkit.structures import ImageSizes, ScoreThresholds
from vitkit.text.class_prompts import Prompts
from vitkit.text.vocabulary import vocabularies_from_json
from vitkit.weights import LoadReport, load_weights
from vitkit.weights.hub import is_hub_name
from vitkit.weights.marian import FILES as TOKEN_FILES
from vitkit.weights.names import RUN_CONFIG, WEIGHTS_SUFFIXES, packaged_or_name, run_weights
from vitkit.weights.published import load_published_config
from vitkit.weights.reading import read_metadata
from vitkit.weights.tokenizer_files import BERT, TOKENIZER, find_tokenizer

Loaded = Predictor | Translator | TextContinuer | MaskFiller
"""A model that is ready to use."""


def load(
    source: str | Path | Mapping[str, Any],
    weights: str | Path | None = None,
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
        weights: a checkpoint, the folder of a run, or a name of the model zoo; None: those of `source`.
        overrides: `key.sub=value` changes to the config.
        classes: names of the labels; None: those that it was trained on, see `read_trained_classes`, which are also
            what a text-prompted model looks for unless it is told otherwise.
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
    config, weights = find_trained(source, weights, overrides=overrides, trust=trust)
    assert weights is not None
    device = "cpu" if device is None else device
    require_device(device)
    precision = resolve_precision(precision, torch.device(device))
    check_runtime(runtime, weights, device)
    if not isinstance(config.get("model"), str | Mapping):
        raise ConfigError(f"{getattr(config, 'path', 'config')}: model is not set, so there is nothing to load.")
    checkpoint = own_checkpoint(weights)
    vocabularies = vocabularies_from_json(checkpoint.get("vocabularies") or {}, str(weights))
    if not vocabularies and isinstance(config["model"], Mapping) and config["model"].get("tokenizer"):
        vocabularies = {"target": find_tokenizer(config["model"]["tokenizer"])}
    constructor, _ = MODELS.resolve(config["model"], "model")
    is_prompted = "text" in getattr(constructor, "takes", ())
    has_classes = "features" not in getattr(constructor, "returns", ())
    if classes is None and has_classes and (is_prompted or not vocabularies):
        if not vocabularies and "target_vocabulary" in parameters_of(constructor):
            if is_prompted:
                raise CheckpointError(
                    f"{weights}: has no vocabulary to read text with, and model.tokenizer is not set. Set it to "
                    f"{BERT}, or to the folder of its files."
                )
            raise CheckpointError(
                f"{weights}: has no vocabularies. Expected a checkpoint that was trained on text, or a folder of the "
                f"transformers library with {', '.join(TOKEN_FILES)} (Marian) or {TOKENIZER} (BERT, GPT-2; needs "
                "pip install tokenizers). For token ids only, build the model (vitkit.apps.inference.find_model) and "
                "load its weights (load_weights)."
            )
        classes, trained_things = read_trained_classes(checkpoint, str(weights), config)
        things = trained_things if things is None else things
        _check_things(str(weights if isinstance(source, Mapping) else source), config, things)
    spec = config["model"]
    if isinstance(spec, Mapping) and not training_queries:
        spec = {name: value for name, value in spec.items() if name != "training_queries"}
    built = build_model(spec, classes=classes, things=things, vocabularies=vocabularies)
    model: Any = built  # or an exported file, in its place
    if is_exported(weights):
        model, report = open_exported_model(weights, built, runtime), LoadReport(str(weights))
    else:
        report = load_weights(built, weights, classes=classes, spec=spec)
    if "source" in vocabularies:
        return Translator(model.to(device), vocabularies, report=report)
    if "masked_tokens" in model.returns:
        return MaskFiller(model.to(device), vocabularies, report=report)
    if "tokens" in model.takes:
        return TextContinuer(model.to(device), vocabularies, report=report)
    settings = dict(
        transforms=_section(config, "data", "val").get("transforms"),
        precision=precision,
        max_image_pixels=_section(config, "data").get("max_image_pixels", MAX_PIXELS),
        report=report,
    )
    sampling = read_sampling(_section(config, "data").get("val"))
    if sampling is not None:
        return VideoPredictor(model.to(device), classes or (), sampling=sampling, **settings)
    return Predictor(
        model.to(device),
        classes or (),
        **settings,
        category_ids=category_ids_of(checkpoint, str(weights), classes or ()),
        channels=_channels(config, model),
        text=_phrases(config, classes) if is_prompted and classes else None,
        **_read_measured(checkpoint, str(weights), classes or ()),
    )


def _phrases(config: Mapping[str, Any], classes: Sequence[str]) -> list[str]:
    """Return the phrase of each class in the prompts that a text-prompted model was trained with."""
    return Prompts(**_section(config, "data", "prompts")).class_phrases(classes)


def _channels(config: Mapping[str, Any], model: nn.Module) -> int | None:
    """Return the number of channels that images are read with; None for RGB of 8 bits."""
    backbone = child(model, "backbone")
    if isinstance(model, ExportedModel):
        backbone = child(model.model, "backbone")
    channels = None if backbone is None else in_channels(backbone)
    stated: int | None = _section(config, "data").get("channels", None if channels == 3 else channels)
    return stated


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


def own_checkpoint(weights: str | Path) -> dict[str, Any]:
    """Return what a checkpoint holds besides its weights; empty for a zoo name, whose files hold weights only."""
    if model_zoo.listed_name(str(weights)) and not exists(weights):
        return {}
    return read_as_checkpoint(weights) if is_exported(weights) else read_metadata(weights)


class FoundModel(NamedTuple):
    """A model's config and its weights."""

    config: Mapping[str, Any]
    weights: str | Path | None
    """A checkpoint's file, or a name of the model zoo whose weights are to be downloaded; None if there are none, as
    for a config by itself."""


def find_model(
    source: str | Path | Mapping[str, Any],
    weights: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> FoundModel:
    """Find the config and the weights of a model, however it is named.

    Args:
        source: one of the following, tried in this order:
            a config that was loaded before;
            the folder of a run;
            a config file (.py, or .json as saved), or any other file: a run's checkpoint or an exported model
                (.onnx, .pt2), which hold their config;
            a name of the model zoo, such as "shapes_dino", whose weights are in the package, or "detr_r50", whose
            weights are downloaded once;
            a folder of the transformers library, or "hf:OWNER/NAME", a repository of its hub, downloaded once;
            the name of an installed config, such as "quickstart/detr", or a family with arguments,
                "mask2former:backbone=swin_tiny,data=ade20k".
            A folder with the name of an installed config is written as a path, "./detr_r50".
        weights: a checkpoint, the folder of a run, or a name of the model zoo; None: those of `source`, if it has any.
        overrides: `key.sub=value` changes to the config.
        trust: let a run's saved config import the code that it names, see `load_config`, and an exported program run.
    Raises:
        ConfigError: there is no such model, or its config is wrong.
        CheckpointError: the checkpoint cannot be read, or holds no config.
    """
    if trust:
        for path in (source, weights):
            if isinstance(path, str | Path) and Path(path).suffix == PROGRAM_SUFFIX and isfile(path):
                trust_program(path)
    if weights is not None:
        weights = transformers_folder(weights) or (
            run_weights(Path(weights)) if isdir(weights) else packaged_or_name(weights)
        )
    if isinstance(source, Mapping):
        return FoundModel(source, weights)
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"got {type(source).__name__} for a model; expected its name, a path or a config. A config's weights are "
            "an argument of their own."
        )
    check_unambiguous(source)
    folder = transformers_folder(source)
    if folder is not None:
        return FoundModel(read_config(source, folder, overrides, trust=trust), folder if weights is None else weights)
    path, name = Path(source), str(source)
    if isdir(path):
        own_weights = run_weights(path) if weights is None else weights
        return FoundModel(load_config(path / RUN_CONFIG, overrides, trust=trust), own_weights)
    if path.suffix in CONFIG_SUFFIXES or has_arguments(name):
        return FoundModel(load_config(path, overrides, trust=trust), weights)
    if isfile(path) or path.suffix in WEIGHTS_SUFFIXES or is_exported(path):
        if weights is not None:
            raise ConfigError(
                f"{name}: is not a config, and has its own weights; got also {str(weights)!r}. Give one of the two."
            )
        return FoundModel(_config_in(path, overrides, trust), path)
    if listed := model_zoo.listed_name(name):
        config = load_published_config(listed, overrides)
        return FoundModel(config, packaged_or_name(listed) if weights is None else weights)
    if find_config(name) is not None:
        return FoundModel(load_config(name, overrides), weights)
    message = (
        f"{name!r} is neither a model of the zoo, nor a run's folder or checkpoint, nor a config (a file that ends in "
        ".py, or an installed one's name)"
    )
    raise ConfigError(unknown(name, {*model_zoo.index(), *config_names()}, message))


def find_trained(
    source: str | Path | Mapping[str, Any],
    weights: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> FoundModel:
    """Find a model that has weights; arguments and other errors are those of `find_model`.

    Raises:
        ConfigError: the model has no weights.
    """
    model = find_model(source, weights, overrides=overrides, trust=trust)
    if model.weights is None:
        name = getattr(source, "path", "the config") if isinstance(source, Mapping) else source
        raise ConfigError(f"{name}: a config has no weights. Give a checkpoint, or the folder of a run.")
    return model


_IN_EXPORTED_FILES = tuple(
    f"model.{name}"
    for name in ("type", "backbone", "neck", "head", "num_queries", "num_classes", "num_layers", "d_model")
)
"""Beginnings of the keys of what an exported file computes; others belong to the processing of its outputs."""


def is_config_only(source: str | Path) -> bool:
    """Whether `find_model` takes a name for a config without weights, so that weights must be given as well."""
    path = Path(source)
    if is_hub_name(source):
        return False
    if path.suffix in CONFIG_SUFFIXES or has_arguments(source):
        return True
    return not exists(path) and not model_zoo.listed_name(str(source))


def _config_in(path: Path, overrides: Sequence[str], trust: bool) -> Config:
    keys = (text.partition("=")[0].strip() for text in overrides)
    fixed = [key for key in keys if key == "model" or key.startswith(_IN_EXPORTED_FILES)]
    if fixed and is_exported(path):
        raise ConfigError(
            f"{path}: is an exported file, whose model cannot be changed by {fixed[0]}=…. Leave that out, or "
            "export the changed model."
        )
    config = own_checkpoint(path).get("config")
    if not isinstance(config, str):
        raise CheckpointError(
            f"{path}: has no config, unlike a run's checkpoint, so its model is not known. Give its config as "
            f"well: CONFIG {path}."
        )
    return load_saved_config(config, path, overrides, trust=trust)


def _section(config: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return the mapping below the keys; empty if there is none, or a plain name in its place."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}
