"""The report of analyze.py for text models, by length."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitkit import build_model
from vitkit.analysis.macs import count_call, count_macs, count_step
from vitkit.analysis.memory import count_parameters, parts
from vitkit.data.text.datasets import TextDataset
from vitkit.errors import ConfigError
from vitkit.inference.load import FoundModel, own_checkpoint
from vitkit.protocols import Dataset
from vitkit.registry import MODELS, parameters_of
from vitkit.seq2seq.captioner import Captioner
from vitkit.seq2seq.decoding import decode
from vitkit.seq2seq.language_models import CausalLanguageModel, MaskedLanguageModel
from vitkit.seq2seq.vocabulary import vocabularies_from_json, vocabularies_of
from vitkit.structures import BOS, EOS
from vitkit.tools.costs import Request, short, training_cost, training_cost_text, training_dataset

TEXT_LENGTHS = (16, 32, 64)
METHODS = ("start", "step", "attend_on", "attend_to", "project_memory", "encode", "look", "logits", "predict")
"""Names of the methods through which decoding runs parts of models."""


def takes_text(config: Mapping[str, Any]) -> bool:
    """Whether a config's model reads or writes text."""
    return "target_vocabulary" in parameters_of(MODELS.resolve(config["model"], "model")[0])


def build_text_model(found: FoundModel, dataset: Dataset | None = None) -> nn.Module:
    """Build an untrained text model, with the vocabularies of its checkpoint or its training data, or the vocabulary
    sizes in its config.

    Raises:
        ConfigError: none of them tells the number of tokens.
    """
    config = found.config
    saved = {} if found.weights is None else own_checkpoint(found.weights).get("vocabularies")
    vocabularies = vocabularies_from_json(saved or {}, str(found.weights))
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


def inputs_of(model: nn.Module, length: int, size: tuple[int, int]) -> dict[str, Tensor]:
    """Return a batch of one text of this length; its translation or continuation has the same length.

    Args:
        length: number of tokens, including BOS or EOS.
        size: height and width of the image that a captioner describes.
    """
    tokens = torch.full((1, length), EOS + 1)
    if isinstance(model, Captioner):
        return {"images": torch.zeros(1, 3, *size, dtype=torch.uint8), "target_in": tokens}
    if isinstance(model, CausalLanguageModel | MaskedLanguageModel):
        return {"tokens": tokens}
    return {"source": tokens, "source_padding": torch.zeros_like(tokens, dtype=torch.bool), "target_in": tokens}


def write_text(model: nn.Module, inputs: Mapping[str, Tensor], length: int) -> None:
    """Let a model write `length` tokens one by one; a model that fills masks predicts all tokens at once."""
    if isinstance(model, MaskedLanguageModel):
        model.predict(inputs["tokens"])
        return
    if isinstance(model, CausalLanguageModel):
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


def text_costs(found: FoundModel, request: Request) -> dict[str, Any]:
    """Report parameters and MACs by part and by length.

    Raises:
        ConfigError: the number of tokens is unknown.
        DataError: a length exceeds the model's number of positions.
    """
    dataset = training_dataset(request) if request.training_macs and request.samples is None else None
    model = build_text_model(found, dataset)
    lengths = request.lengths or TEXT_LENGTHS
    names, parameters = parts(model, request.depth), count_parameters(model)
    rows: dict[str, dict[str, Any]] = {name: asdict(parameters[name]) for name in names}
    step, unknown = {}, set()
    with without_onednn():
        for length in lengths if request.counts_macs else ():
            inputs = inputs_of(model, length, request.size or (224, 224))
            counted = {
                "forward": count_macs(model, **inputs),
                "inference": count_call(model, lambda i=inputs, n=length: write_text(model, i, n), methods=METHODS),
            }
            step[length] = count_step(lambda i=inputs: model(**i)["logits"])
            for kind, macs in counted.items():
                unknown |= set(macs.unknown)
                for name in names:
                    rows[name].setdefault(kind, {})[length] = macs.by_module[name]
    rows = {name: row for name, row in rows.items() if row["total"] or any(row.get("forward", {}).values())}
    report = {"model": request.model, "lengths": list(lengths), "parts": rows, "step": step, "unknown": sorted(unknown)}
    if request.training_macs:
        report["training"] = text_training_cost(model, request, dataset)
    if request.prints:
        print_text_costs(report, {name: type(model.get_submodule(name)).__name__ for name in rows})
    return report


def text_training_cost(model: nn.Module, request: Request, dataset: Dataset | None) -> dict[str, Any]:
    """Return the MACs of a whole training on texts of the mean length, or of the only one of `request.lengths`.

    Raises:
        ConfigError: the length or the number of epochs is unknown.
    """
    lengths = list(request.lengths or ())
    if not lengths and isinstance(dataset, TextDataset):
        lengths = [round(float(dataset.lengths().mean()))]
    if not lengths:
        raise ConfigError("--training-macs: the mean length of the texts is unknown. Give it: --lengths TOKENS.")
    if len(lengths) > 1:
        raise ConfigError(f"--training-macs: got {len(lengths)} lengths. Give the mean one only: --lengths TOKENS.")
    (length,) = lengths
    with without_onednn():
        forward = count_macs(model, **inputs_of(model, length, request.size or (224, 224))).total
    samples = request.samples or len(dataset.training_indices())
    return training_cost(request, forward, samples) | {"length": length, "per_token": forward / length}


def print_text_costs(report: dict[str, Any], types: dict[str, str]) -> None:
    """Print a line for each part: parameters, and M MACs in training and inference at each length."""
    lengths = list(report["step"])
    titles = [f"{kind} {length}" for kind in ("train", "infer") for length in lengths]
    lines = [["part", "type", "parameters", *titles]]
    for name, row in report["parts"].items():
        indent = "  " * (name.count(".") + 1 if name else 0)
        macs = [f"{row[kind][length] / 1e6:,.2f}" for kind in ("forward", "inference") for length in lengths]
        lines.append([indent + (name.rpartition(".")[2] or "(all)"), types[name], f"{row['total']:,}", *macs])
    print(f"{report['model']}: M MACs of one text, by its length in tokens\n")
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        cells = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))]
        print("  ".join(cells).rstrip())
    if lengths:
        print(
            "\ntrain: the forward pass over a source and a target of that many tokens each, or over one text.\n"
            "infer: a source of that many tokens is read, if there is one, and as many are generated greedily, one "
            "after another; a model that fills masks predicts all at once.\n"
            "a training step, forward and backward: "
            + ", ".join(f"{macs / 1e6:,.2f} M at {length}" for length, macs in report["step"].items())
        )
    if cost := report.get("training"):
        note = f" (a text of {cost['length']} tokens, {short(cost['per_token'])} MACs per token)"
        print(training_cost_text(cost, "texts", note))
    if report["unknown"]:
        print(f"UNKNOWN, not counted: {', '.join(report['unknown'])}")
