"""`vitkit.explain`: draw what any kind of model attends to."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vitkit.apps.explanations.backbone_models import drop_training_parts, is_backbone, load_backbone
from vitkit.apps.explanations.backbones import explain_backbone, has_located_attention, mean_distances
from vitkit.apps.explanations.clips import explain_clip
from vitkit.apps.explanations.dense import explain_attention, explain_sampling, explain_slots
from vitkit.apps.explanations.distances import plot_distances
from vitkit.apps.explanations.explain_options import Draw, ExplainRequest, Explanation, check_points
from vitkit.apps.explanations.images import Point, attention_layers, decoder_layers, encoder_layers, samples_points
from vitkit.apps.explanations.prompts import explain_prompt
from vitkit.apps.explanations.reconstruction import explain_reconstruction
from vitkit.apps.explanations.text_figures import explain_caption, explain_text
from vitkit.apps.inference import Loaded, Predictor, find_trained, images_in, load
from vitkit.apps.inference.inputs import ImageLike
from vitkit.apps.inference.load import check_not_exported
from vitkit.apps.inference.writing import make_new_folder
from vitkit.data.loading.settings import DataSettings
from vitkit.data.transforms.pipelines import EvalResize
from vitkit.engine.build import build_criterion
from vitkit.errors import ConfigError
from vitkit.protocols.dataset import Dataset
from vitkit.protocols.model import child


class ImageFigures(NamedTuple):
    """The figures of an image for one kind of model."""

    apply_to: Callable[[nn.Module], bool]
    draw: Draw
    options: frozenset[str]
    """The options of `explain` that choose what is drawn."""


def _has_queries_or_encoder(model: nn.Module) -> bool:
    # The blocks of a classifier's ViT, or of one that learns without labels, are drawn as those of a backbone.
    if {"class_scores", "text", "features"} & set(model.returns):
        return False
    return bool(decoder_layers(model) or encoder_layers(model))


def _writes_text(model: nn.Module) -> bool:
    return "text" in model.returns


def _samples(model: nn.Module) -> bool:
    return _has_queries_or_encoder(model) and samples_points(model)


IMAGE_FIGURES = (
    ImageFigures(_writes_text, explain_caption, frozenset({"decoder_layer"})),
    ImageFigures(_samples, explain_sampling, frozenset({"queries", "threshold"})),
    ImageFigures(
        lambda model: _has_queries_or_encoder(model) and not _samples(model),
        explain_attention,
        frozenset({"points", "queries", "threshold", "encoder_layer", "decoder_layer"}),
    ),
    ImageFigures(
        lambda model: bool(attention_layers(model).prompt), explain_prompt, frozenset({"queries", "threshold"})
    ),
    ImageFigures(lambda model: model.mask_ratio is not None, explain_reconstruction, frozenset()),
    ImageFigures(
        lambda model: has_located_attention(model) and not _writes_text(model), explain_backbone, frozenset({"points"})
    ),
)
"""All figures of images, by kind of model; a model gets all that apply to it."""

_SOURCES = {
    "text": ("image",),
    "points": ("image", "video"),
    "frame": ("video",),
    "queries": ("image", "dataset"),
    "threshold": ("image",),
    "encoder_layer": ("image", "text", "video"),
    "decoder_layer": ("image", "text"),
    "html": ("image", "text", "video"),
    "words": ("text",),
    "size": ("image", "images", "video"),
    "compare": ("images",),
    "max_images": ("images",),
}
"""The options that apply only to some inputs, and these inputs."""


def explain(
    model: str | Path | Mapping[str, Any] | Loaded,
    weights: str | Path | None = None,
    *,
    image: ImageLike | None = None,
    text: str | Sequence[str] | None = None,
    video: str | Path | None = None,
    images: str | Path | None = None,
    max_images: int | None = None,
    dataset: bool = False,
    points: Sequence[Point] = (),
    queries: Sequence[int] = (),
    frame: int | None = None,
    encoder_layer: int | None = None,
    decoder_layer: int | None = None,
    threshold: float | None = None,
    beams: int = 4,
    size: tuple[int, int] | None = None,
    compare: Sequence[str | Path] = (),
    html: bool = False,
    words: bool = False,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    trust: bool = False,
    device: str | torch.device = "cpu",
) -> Explanation:
    """Draw what a model attends to, as `vitkit explain` does.

    `explain("detr_r50", image="street.jpg").files`

    Args:
        model: a model as for `vitkit.load`, or one that is loaded; or a backbone's name, as for `vitkit analyze`.
        weights: the weights of a config or a backbone. A backbone's need not have a classifier's head; None: its
            published ones.
        image: the image to explain, in any form that a `Predictor` takes.
        text: the sentence that a model of text reads; or with an image, what a text-prompted model looks for in it.
        video: the file or folder of frames of which a model of clips explains the middle clip.
        images: a folder of images to average attention distances over.
        max_images: only the first of these images, in alphabetical order; None: all.
        dataset: draw where each query's boxes lie over the config's validation data.
        points: (x, y) of points to draw the attention of, in pixels of the image, or of the video's crop; empty: the
            centers of the best boxes, or where the class token looks.
        queries: indices of the queries to draw; empty: the best ones.
        frame: index of the clip's frame that has the points; None: the middle one.
        encoder_layer, decoder_layer: index of the layer to draw, where not all are drawn; None: the last.
        threshold: the lowest score of the drawn queries; None: the model's own.
        beams: number of beams in the tree of a model that writes text.
        size: (height, width) in pixels to which images are resized; None: as by the validation transforms, or for a
            backbone's name to a short side of 480 pixels (for clips 224).
        compare: another model, or a config or backbone and its weights, whose attention distances are drawn alongside.
        html: also write an HTML page that shows what attends to what under the mouse pointer.
        words: draw attention among words, each joined from its subwords, in place of tokens.
        out: folder to write; None: a new one, runs/explain, with a number if that exists.
        overrides: `key.sub=value` changes to the config; for a backbone's name `key=value`, its arguments.
        trust: see `vitkit.load`.
        device: such as "cpu", "cuda" or "mps".
    Raises:
        ConfigError: the model has no attention that can be drawn for this input, or an option does not apply to it.
        CheckpointError: the weights cannot be read, or do not fit.
        DataError: an input cannot be read, or a point is outside of it.
    """
    # With an image, a text says what to look for.
    sentence, sought = (text, None) if image is None else (None, text)
    inputs = {"image": image, "text": sentence, "video": video, "images": images, "dataset": dataset or None}
    given = dict(text=sought, points=points or None, frame=frame, queries=queries or None, threshold=threshold)
    given |= dict(encoder_layer=encoder_layer, decoder_layer=decoder_layer, html=html or None, words=words or None)
    given |= dict(size=size, compare=compare or None, max_images=max_images)
    options = _check_inputs(_names(inputs), _names(given), weights)
    _check_values(max_images, out)
    subject = _find_subject(model, weights, dataset=dataset, overrides=overrides, trust=trust, device=device)
    result = Explanation(make_new_folder(Path("runs/explain")) if out is None else Path(out))
    if subject.loaded.report is not None:
        result.notes.append(str(subject.loaded.report))
    request = ExplainRequest(points, queries, frame, encoder_layer, decoder_layer, threshold, beams, html, words)
    if sentence is not None:
        explain_text(_of_text(subject.loaded), sentence, request, result)
        return result
    predictor = _of_images(subject.loaded, size)
    if sought is not None:
        predictor = predictor.with_text(sought)
    if video is not None:
        result.stem = Path(video).stem
        explain_clip(predictor, video, request, result)
    if image is not None:
        explain_image(predictor, image, _with_criterion(request, subject, predictor), result, options=options)
    result.stem = ""
    if images is not None:
        predictors = {subject.name: predictor}
        if compare:  # named by their weights, as two checkpoints may share a config
            predictors[str(compare[-1])] = _of_images(_load_other(compare, trust=trust, device=device), size)
        explain_distances(predictors, images_in(Path(images), channels=predictor.channels)[:max_images], result)
    if subject.data is not None:
        explain_slots(predictor.model, subject.data.val_loader(subject.split), device, request, result)
    return result


class _Subject(NamedTuple):
    """A loaded model to explain."""

    loaded: Loaded
    name: str
    config: Mapping[str, Any] = {}
    """Its config; {} if it has none, or was given loaded."""
    data: DataSettings | None = None
    """The config's data, if the model is to be explained over its validation data."""
    split: Dataset | None = None
    """The validation data."""


def _find_subject(
    model: str | Path | Mapping[str, Any] | Loaded,
    weights: str | Path | None,
    *,
    dataset: bool,
    overrides: Sequence[str],
    trust: bool,
    device: str | torch.device,
) -> _Subject:
    """Load the model that is to be explained; the arguments and errors are those of `explain`."""
    if not isinstance(model, str | Path | Mapping):
        if dataset:
            raise ConfigError("dataset: a loaded model has no config of its data. Give the model's name in its place.")
        subject = _Subject(model, type(model.model).__name__)
    elif is_backbone(model):
        loaded = load_backbone(model, weights, overrides=overrides, device=device)
        subject = _Subject(loaded, str(weights or model))
    else:
        name = str(model if isinstance(model, str | Path) and weights is None else weights)
        config, weights = find_trained(model, weights, overrides=overrides, trust=trust)
        data = DataSettings(**config.get("data", {})) if dataset else None
        split = None if data is None else data.dataset("val")
        classes = None if split is None else split.classes
        subject = _Subject(load(config, weights, classes=classes, device=device), name, config, data, split)
    check_not_exported(subject.loaded, "explain")
    return subject


def _load_other(compare: Sequence[str | Path], *, trust: bool, device: str | torch.device) -> Loaded:
    """Load the model that another one is compared with."""
    if is_backbone(compare[0]):
        other = load_backbone(*compare, device=device)
    else:
        other = load(*compare, device=device, trust=trust)
    check_not_exported(other, "compare")
    return other


def _names(values: Mapping[str, Any]) -> list[str]:
    return [name for name, value in values.items() if value is not None]


def _check_inputs(inputs: Sequence[str], options: Sequence[str], weights: str | Path | None) -> list[str]:
    """Return the options if all apply to one of the inputs.

    Raises:
        ConfigError: there is no input, or an option or another input does not go with it.
    """
    if not inputs and weights is not None:
        what = f"'{weights}', the second argument, is the model's weights"
        raise ConfigError(f"nothing to explain: {what}. Name what to explain, such as image=PHOTO.")
    if not inputs:
        raise ConfigError("nothing to explain: give an image, a text, a video, a folder of images, or dataset.")
    if len(inputs) > 1 and {"text", "video"} & set(inputs):
        raise ConfigError(f"{', '.join(inputs)}: a text or a video is explained by itself. Give one of these.")
    for option in options:
        if not set(_SOURCES[option]) & set(inputs):
            raise ConfigError(f"{option}: applies only to {' or '.join(_SOURCES[option])}. Leave this out.")
    return list(options)


def _with_criterion(request: ExplainRequest, subject: _Subject, predictor: Predictor) -> ExplainRequest:
    """Add a mask model's loss, whose points are drawn, if its config has one."""
    if not (predictor.model.classifies_masks and "criterion" in subject.config):
        return request
    return replace(request, criterion=build_criterion(subject.config["criterion"], predictor.classes))


def _check_values(max_images: int | None, out: str | Path | None) -> None:
    """Raise a ConfigError if there is no image to average over, or if the folder to write is a file."""
    if max_images is not None and max_images < 1:
        raise ConfigError(f"max_images: got {max_images}; expected at least 1.")
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise ConfigError(f"out: '{out}' is a file; expected a folder to write into.")


def _of_text(loaded: Loaded) -> Loaded:
    if isinstance(loaded, Predictor):
        raise ConfigError(f"text: {type(loaded.model).__name__} reads no text. Give an image or a video.")
    return loaded


def _of_images(loaded: Loaded, size: tuple[int, int] | None) -> Predictor:
    """Return a predictor of images, which resizes them to (height, width); None: as the loaded one does."""
    if not isinstance(loaded, Predictor):
        raise ConfigError(f"{type(loaded.model).__name__} reads text, not images. Give a text.")
    if size is None:
        return loaded
    predictor = copy.copy(loaded)
    predictor.transforms, predictor.image_sizes = EvalResize(size=size), None
    return predictor


def explain_image(
    predictor: Predictor, image: ImageLike, request: ExplainRequest, result: Explanation, *, options: Sequence[str] = ()
) -> None:
    """Draw everything that applies to a model of images.

    Args:
        options: the names of the options that were asked for.
    Raises:
        ConfigError: nothing applies to the model, or an option does not.
    """
    model = predictor.model
    if predictor.sampling is not None:
        raise ConfigError("image: the model classifies clips, so an image has no meaning for it. Give a video.")
    figures = [figures for figures in IMAGE_FIGURES if figures.apply_to(model)]
    backbone = child(model, "backbone") or model
    name = type(model).__name__ if backbone is model else f"{type(model).__name__} on {type(backbone).__name__}"
    if not figures:
        raise ConfigError(
            f"{name} has no attention in the image that can be drawn: expected queries that attend to the image (DETR, "
            "Deformable DETR, DINO, MaskFormer, Mask2Former, EoMT and others), an encoder of its locations, or a "
            "backbone with attention (ViT, also timm's, Swin, SwinV2, MViT, LRNet, NonLocalResNet)."
        )
    accepted = {"html", "size"}.union(*(part.options for part in figures))
    if "text" in model.takes:
        accepted.add("text")
    if unused := [option for option in options if option not in accepted | {"compare", "max_images"}]:
        raise ConfigError(
            f"{', '.join(unused)}: not for {name}, whose figures take {', '.join(sorted(accepted))}. Leave this out."
        )
    array = predictor.to_array(image)
    what = f"'{image}'" if isinstance(image, str | Path) else "the image"
    check_points(request.points, array.shape[1], array.shape[0], what)
    result.stem = Path(image).stem if isinstance(image, str | Path) else "image"
    for part in figures:
        part.draw(predictor, array, request, result)


def explain_distances(predictors: Mapping[str, Predictor], paths: Sequence[Path], result: Explanation) -> None:
    """Draw the mean attention distances of each layer's heads over images, for one or two models."""
    distances = {name: mean_distances(drop_training_parts(part), paths) for name, part in predictors.items()}
    as_arrays = {name: {layer: heads.numpy() for layer, heads in layers.items()} for name, layers in distances.items()}
    plot_distances(as_arrays, result.file("attention_distance.png"), num_images=len(paths))
    for name, layers in distances.items():
        for layer, heads in layers.items():
            label = f"{layer}: mean attention distance in pixels"
            result.numbers[label if len(distances) == 1 else f"{name}: {label}"] = float(heads.mean())
