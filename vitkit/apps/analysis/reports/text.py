"""Costs of text models by part and by the length of texts."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from vitkit.apps.analysis.macs import count_call, count_macs, count_step
from vitkit.apps.analysis.memory import count_parameters, parts
from vitkit.apps.analysis.reports.subject import Subject, validation_size
from vitkit.apps.analysis.reports.training import TrainingMacs, training_dataset, training_macs_of
from vitkit.data.text.datasets import TextDataset
from vitkit.engine.build import build_model
from vitkit.errors import ConfigError
from vitkit.ops.images import in_channels
from vitkit.protocols.dataset import Dataset
from vitkit.registry import MODELS, parameters_of
from vitkit.seq2seq.decoding import decode
from vitkit.structures import BOS, EOS
from vitkit.text.vocabulary import vocabularies_from_json, vocabularies_of

TEXT_LENGTHS = (16, 32, 64)
IMAGE_SIZE = (224, 224)
"""Height and width of the image that a captioner describes, if neither an argument nor its data says."""
METHODS = ("start", "step", "attend_on", "attend_to", "project_memory", "encode", "look", "logits", "predict")
"""Names of the methods through which decoding runs parts of models."""


def build_text_model(subject: Subject, dataset: Dataset | None = None) -> nn.Module:
    """Build an untrained text model, with the vocabularies of its checkpoint or its training data, or the vocabulary
    sizes in its config.

    Raises:
        ConfigError: none of them tells the number of tokens.
    """
    config, weights = subject.config, subject.found.weights
    saved = {} if weights is None else weights.metadata.get("vocabularies")
    vocabularies = vocabularies_from_json(saved or {}, str(weights))
    if not saved and dataset is not None:
        vocabularies = vocabularies_of(dataset)
    if vocabularies:
        return build_model(config["model"], vocabularies=vocabularies).eval()
    spec = {"type": config["model"]} if isinstance(config["model"], str) else dict(config["model"])
    train = (config.get("data") or {}).get("train") or {}
    vocabulary = train.get("vocabulary") if isinstance(train, Mapping) else None
    size = vocabulary.get("size") if isinstance(vocabulary, Mapping) else None
    defaults = {"source_size": size, "target_size": size, "mask_id": EOS + 1}
    accepted = parameters_of(MODELS.resolve(spec)[0])
    spec = {name: value for name, value in defaults.items() if name in accepted and value is not None} | spec
    return build_model(spec).eval()


def inputs_of(model: nn.Module, length: int, size: tuple[int, int] | None) -> dict[str, Tensor]:
    """Return a batch of one text of this length; its translation or continuation has the same length.

    Args:
        length: number of tokens, including BOS or EOS.
        size: height and width of the image that a captioner describes; other models need none.
    """
    tokens = torch.full((1, length), EOS + 1)
    if "images" in model.takes:
        return {"images": torch.zeros(1, in_channels(model.backbone), *size, dtype=torch.uint8), "target_in": tokens}
    if "tokens" in model.takes:
        return {"tokens": tokens}
    return {"source": tokens, "source_padding": torch.zeros_like(tokens, dtype=torch.bool), "target_in": tokens}


def write_text(model: nn.Module, inputs: Mapping[str, Tensor], length: int) -> None:
    """Let a model write `length` tokens one by one; a model that fills masks predicts all tokens at once."""
    if "masked_tokens" in model.returns:
        model.predict(inputs["tokens"])
        return
    if "tokens" in model.takes:
        inputs = {"tokens": torch.full((1, 1), BOS)}
    # No token before the last may be EOS.
    decode(model, inputs, replace(model.decoding, method="greedy", n_best=1, max_length=length, min_length=length - 1))


@contextmanager
def without_onednn() -> Iterator[None]:
    """Run PyTorch's native operators: oneDNN's LSTM is a single operator whose MACs cannot be counted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


@dataclass(frozen=True)
class TextCosts:
    """The costs of a text model."""

    model: str
    lengths: list[int]
    """Lengths of texts in tokens."""
    parts: dict[str, dict[str, int | dict[int, int]]]
    """Part -> its parameters in "total" and "trainable", and "forward" and "inference": length -> MACs."""
    types: dict[str, str]
    """Part -> the name of its class."""
    step: dict[int, int]
    """Length -> the MACs of a training step, forward and backward."""
    unknown: list[str]
    """Operators that may have MACs and are not counted."""
    training: TrainingMacs | None


def text_costs(
    subject: Subject,
    *,
    lengths: Sequence[int] | None,
    size: int | tuple[int, int] | None,
    depth: int,
    macs: bool,
    training_macs: bool,
    samples: int | None,
) -> TextCosts:
    """Count parameters and MACs by part and by length; arguments as in `analyze`.

    Raises:
        ConfigError: the number of tokens is unknown, or a model without images is given their size.
        DataError: a length exceeds the model's number of positions.
    """
    constructor, _ = MODELS.resolve(subject.config["model"])
    if size is not None and "backbone" not in parameters_of(constructor):
        raise ConfigError(f"--size: {constructor.__name__} takes no images. Models of text have --lengths.")
    dataset = training_dataset(subject) if training_macs and samples is None else None
    model = build_text_model(subject, dataset)
    if isinstance(size, int):
        size = size, size
    if size is None and "images" in model.takes:
        size, _ = validation_size(subject.config) or (IMAGE_SIZE, "")
    names, parameters = parts(model, depth), count_parameters(model)
    rows = {name: asdict(parameters[name]) for name in names}
    step, unknown = {}, set()
    with without_onednn():
        for length in (lengths or TEXT_LENGTHS) if macs else ():
            inputs = inputs_of(model, length, size)
            counts = {
                "forward": count_macs(model, **inputs),
                "inference": count_call(model, lambda i=inputs, n=length: write_text(model, i, n), methods=METHODS),
            }
            step[length] = count_step(lambda i=inputs: model(**i)["logits"])
            for kind, counted in counts.items():
                unknown |= set(counted.unknown)
                for name in names:
                    rows[name].setdefault(kind, {})[length] = counted.by_module[name]
    rows = {name: row for name, row in rows.items() if row["total"] or any(row.get("forward", {}).values())}
    training = None
    if training_macs:
        length = mean_length(lengths, dataset)
        with without_onednn():
            forward = count_macs(model, **inputs_of(model, length, size)).total
        count = samples or len(dataset.training_indices())
        training = training_macs_of(subject, forward, count, length=length)
    types = {name: type(model.get_submodule(name)).__name__ for name in rows}
    return TextCosts(subject.name, list(lengths or TEXT_LENGTHS), rows, types, step, sorted(unknown), training)


def mean_length(lengths: Sequence[int] | None, dataset: Dataset | None) -> int:
    """Return the only one of some lengths, or the mean length of the dataset's texts.

    Raises:
        ConfigError: there are several lengths, or the mean one is unknown.
    """
    if not lengths and isinstance(dataset, TextDataset):
        return round(float(dataset.lengths().mean()))
    if not lengths:
        raise ConfigError("--training-macs: the mean length of the texts is unknown. Give it: --lengths TOKENS.")
    if len(lengths) > 1:
        raise ConfigError(f"--training-macs: got {len(lengths)} lengths. Give the mean one only: --lengths TOKENS.")
    return lengths[0]
