"""The reports of tools/analyze.py for backbones and models of images, by part."""

import fnmatch
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit import BACKBONES, build_model, model_zoo
from vitkit.analysis.activations import Activations, count_activations, countable_device
from vitkit.analysis.clips import CLIPS, clip_cost
from vitkit.analysis.fvcore_macs import count_macs_by_fvcore
from vitkit.analysis.macs import count_macs
from vitkit.analysis.memory import (
    OPTIMIZER_STATES,
    attention_matrices,
    count_parameters,
    measure,
    parts,
    training_memory,
)
from vitkit.checkpoint import classes_of
from vitkit.config import config_names
from vitkit.config.overrides import apply_override, split_override
from vitkit.data.loading.loader import DataSettings
from vitkit.engine.settings import require
from vitkit.errors import ConfigError, DataError
from vitkit.inference import find_model, is_config_only
from vitkit.inference.load import FoundModel, own_checkpoint
from vitkit.models.classifier import Classifier
from vitkit.protocols import Dataset
from vitkit.registry import MODELS, nearest, parameters_of
from vitkit.visualization.costs import Accuracy, plot_accuracy, plot_costs

DETECTION_SIZE = (800, 1066)
"""Height and width of an image with short side 800 and COCO's most frequent aspect ratio."""
FLOAT32 = 4
MIB = 2**20


@dataclass(frozen=True)
class Request:
    """What is reported of which model."""

    model: str = "*"
    """A backbone's name, or what `find_model` takes; for a table and for clips a pattern of names."""
    config: Mapping[str, Any] | None = None
    """The config of a model; None: a backbone."""
    classes: Sequence[str] | None = None
    """The classes that the model was trained on; None: as many as its config sets, or the model's default."""
    overrides: Sequence[str] = ()
    """For a backbone, `key=value`."""
    size: tuple[int, int] | None = None
    """Height and width of the images; None: those of the published figures, or a common size."""
    frames: int | None = None
    batch_size: int = 1
    depth: int = 2
    """The depth of the parts: 2 includes head.encoder."""
    counts_macs: bool = True
    """Whether MACs are counted, for which the model is run once."""
    fvcore: bool = False
    """Whether MACs are also counted by fvcore."""
    time: bool = False
    repeats: int = 5
    device: str = "cpu"
    training: int = 1
    """Number of GPUs."""
    training_macs: bool = False
    """Whether the MACs of the whole training are reported."""
    samples: int | None = None
    """The images or texts of an epoch for that; None: those of data.train."""
    lengths: Sequence[int] | None = None
    """Lengths of texts in tokens."""
    plot: str | None = None
    """The file of the plot of accuracy against MACs that is drawn of a table."""
    clips: str | None = None
    """The PNG of the costs of clips."""
    prints: bool = True
    """Whether tables are printed."""


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return backbone variant -> its published figures, those counted on the original code, and their input."""
    path = Path(model_zoo.__file__).parent / "backbones.json"
    return json.loads(path.read_text(encoding="utf-8"))


def is_config(name: str) -> bool:
    """Whether a name is that of a model with a config rather than that of a backbone."""
    return name not in BACKBONES


def find_named(
    name: str, weights: str | None = None, *, overrides: Sequence[str] = (), trust: bool = False
) -> FoundModel | None:
    """Return the model of a name, with its config; None for a backbone.

    Raises:
        ConfigError: there is no model of that name; the message lists the known names, including backbones.
    """
    if not is_config(name):
        return None
    if is_config_only(name) and not name.endswith((".py", ".json")) and name not in config_names():
        names = {*BACKBONES.names(), *config_names()}
        raise ConfigError(f"{name!r} is neither a backbone nor a model or a config. {nearest(name, names)}")
    named = find_model(name, weights, overrides=overrides, trust=trust)
    require(named.config, "model")
    return named


def build(request: Request, *, device: str) -> nn.Module:
    """Return the model of the config, or the backbone, in evaluation mode; raises like `build_backbone`."""
    if request.config is None:
        return build_backbone(request.model, request.overrides, device=device)
    with torch.device(device):
        return build_model(request.config["model"], classes=request.classes).eval()


def trained_classes(found: FoundModel) -> list[str] | None:
    """Return the classes that a model's checkpoint names; None if it names none or there is no checkpoint."""
    return None if found.weights is None else classes_of(own_checkpoint(found.weights), str(found.weights))


def default_classes(request: Request) -> int | None:
    """Return the number of classes that a model has only by default; None if it is known or the model has none."""
    if request.config is None or request.classes is not None:
        return None
    constructor, arguments = MODELS.resolve(request.config["model"])
    parameter = parameters_of(constructor).get("num_classes")
    return None if parameter is None or "num_classes" in arguments else parameter.default


def build_backbone(name: str, overrides: Sequence[str] = (), *, device: str) -> nn.Module:
    """Return a backbone in evaluation mode, with the classes of its published weights.

    Raises:
        ConfigError: there is no such backbone, or an override does not fit.
    """
    spec = {"type": name, "num_classes": published().get(name, {}).get("num_classes", 1000)}
    config = {"model": {"type": "Classifier", "backbone": spec}}
    for text in overrides:
        key, raw = split_override(text)
        apply_override(config, f"model.backbone.{key}", raw)
    with torch.device(device):
        return BACKBONES.build(config["model"]["backbone"]).eval()


def input_shape(request: Request, model: nn.Module) -> tuple[int, ...]:
    """Return the shape of the input, (N, 3, [T,] H, W)."""
    default = (3, *DETECTION_SIZE) if is_config(request.model) and not isinstance(model, Classifier) else (3, 224, 224)
    channels, *frames, height, width = published().get(request.model, {}).get("input", default)
    frames = frames if request.frames is None else [request.frames]
    return (request.batch_size, channels, *frames, *(request.size or (height, width)))


def costs(request: Request) -> dict[str, Any]:
    """Report parameters, MACs, time and memory by part."""
    counting = request.counts_macs or request.time or request.fvcore
    model = build(request, device="cpu" if counting else "meta")
    shape = input_shape(request, model)
    names = parts(model, request.depth)
    parameters = count_parameters(model)
    macs = None if not request.counts_macs else count_macs(model, torch.zeros(shape))
    by_fvcore = count_macs_by_fvcore(model, torch.zeros(shape)) if request.fvcore else None
    measured = {}
    if request.time:
        model.to(request.device)
        measured = measure(model, torch.zeros(shape, device=request.device), names=names, repeats=request.repeats)
    rows = {}
    for name in names:
        row = asdict(parameters[name])
        row |= {} if macs is None else {"macs": macs.by_module[name]}
        row |= asdict(measured[name]) if name in measured else {}
        if any(row.values()):
            rows[name] = row
    report = {"model": request.model, "input": shape, "parts": rows}
    if macs is not None:
        report |= {"by_operator": macs.by_operator, "not_counted": macs.uncounted, "unknown": macs.unknown}
    if by_fvcore is not None:
        report |= {"macs_by_fvcore": by_fvcore.total}
    if request.training_macs and macs is not None:
        images = request.samples or len(training_dataset(request).training_indices())
        report["training"] = training_cost(request, macs.total // request.batch_size, images)
    if (num_classes := default_classes(request)) is not None:
        report["default_classes"] = num_classes
    if request.prints:
        print_costs(report, {name: type(model.get_submodule(name)).__name__ for name in rows}, request.device)
    return report


def training_dataset(request: Request) -> Dataset:
    """Build the training data of a config.

    Raises:
        ConfigError: the config has none; the message says how a number is given instead.
        DataError: it cannot be read; likewise.
    """
    remedy = "Give the images or texts of an epoch: --samples N."
    data = DataSettings(**(request.config or {}).get("data") or {})
    if data.train is None:
        raise ConfigError(f"--training-macs: {request.model} has no data.train. {remedy}")
    try:
        return data.dataset("train")
    except (ConfigError, DataError) as error:
        raise type(error)(f"--training-macs: {error} {remedy}") from error


def training_cost(request: Request, forward: int, samples: int) -> dict[str, Any]:
    """Return the MACs of a whole training, in which a backward pass costs as much as two forward passes.

    Args:
        forward: MACs of a forward pass of one image or text.
        samples: the images or texts of an epoch.
    Raises:
        ConfigError: the number of epochs is unknown.
    """
    epochs = ((request.config or {}).get("train") or {}).get("epochs")
    if epochs is None:
        raise ConfigError(f"--training-macs: {request.model} has no train.epochs. Analyze a config that sets it.")
    return {"forward": forward, "samples": samples, "epochs": epochs, "macs": 3 * forward * samples * epochs}


def training_cost_text(cost: Mapping[str, Any], noun: str, note: str = "") -> str:
    """Return a line such as "training: 3 x 4.1 G MACs x 1.28 M images x 300 epochs = 4.7e18 MACs (9.4e18 FLOPs)"."""
    forward, samples, macs = short(cost["forward"]), short(cost["samples"]), cost["macs"]
    text = f"training: 3 x {forward} MACs{note} x {samples} {noun} x {cost['epochs']} epochs = {macs:.2g} MACs"
    return f"{text} ({2 * macs:.2g} FLOPs)".replace("e+", "e")


def short(number: float) -> str:
    """Return a number in four digits with a prefix: "4.112 G", "128 k", "640"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g} {prefix}"
    return f"{number:.4g}"


def print_costs(report: dict[str, Any], types: dict[str, str], device: str) -> None:
    """Print a line for each part, and the operators that were counted."""
    columns = [  # field, title, unit, format
        ("total", "parameters", 1, ",.0f"),
        ("trainable", "trainable", 1, ",.0f"),
        ("macs", "G MACs", 1e9, ".3f"),
        ("seconds", "ms", 1e-3, ".1f"),
        ("peak_bytes", "peak MiB", MIB, ".1f"),
        ("saved_bytes", "saved MiB", MIB, ".1f"),
    ]
    columns = [column for column in columns if column[0] in report["parts"][""]]
    lines = [["part", "type", *(title for _, title, _, _ in columns)]]
    for name, row in with_own(report["parts"]):
        indent = "  " * (name.count(".") + 1 if name else 0)
        lines.append(
            [indent + (name.rpartition(".")[2] or "(all)"), types.get(name, "")]
            + [format(row[field] / unit, spec) if field in row else "" for field, _, unit, spec in columns]
        )
    notes = []
    if "seconds" in report["parts"][""]:
        notes += [
            f"\nms: median of the forward pass on {device}. peak: tensors of the forward pass, above those before it.",
            "saved: what a training step stores for the backward pass.",
        ]
    if "by_operator" in report:
        counted = sorted(report["by_operator"].items(), key=lambda item: -item[1])
        notes.append("\ncounted: " + ", ".join(f"{name} {count / 1e9:.3f} G" for name, count in counted if count))
        notes.append("not counted, as in papers: " + (join_counts(report["not_counted"]) or "nothing"))
        if report["unknown"]:
            notes.append(f"UNKNOWN, not counted: {join_counts(report['unknown'])}")
    if "macs_by_fvcore" in report:
        notes.append(f"counted by fvcore: {report['macs_by_fvcore'] / 1e9:.3f} G")
    if "default_classes" in report:
        notes.append(
            f"\nclasses: {report['default_classes']}, the model's default; a run has those of its data: "
            "model.num_classes=N"
        )
    if "training" in report:
        size = "x".join(map(str, report["input"][2:]))
        plural, one = ("clips", "a clip") if len(report["input"]) == 5 else ("images", "an image")
        notes.append("\n" + training_cost_text(report["training"], plural, f" ({one} of {size})"))
    print_table(report, "", lines, notes)


def with_own(rows: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows and, below a part whose listed parts have fewer MACs than itself, the rest as "(itself)"."""
    for name, row in rows.items():
        yield name, row
        inside = [other.get("macs", 0) for part, other in rows.items() if part and part.rpartition(".")[0] == name]
        own = row.get("macs", 0) - sum(inside)
        if inside and own > 0:
            yield f"{name}.(itself)" if name else "(itself)", {"macs": own}


def join_counts(counts: dict[str, int]) -> str:
    """Return "add x3, relu x2"."""
    return ", ".join(f"{name} x{count}" for name, count in sorted(counts.items()))


def print_table(
    report: dict[str, Any], what: str, lines: Sequence[Sequence[str]], notes: Sequence[str], *, left: int = 2
) -> None:
    """Print a report's heading, its table with the first `left` columns left-aligned, and notes below."""
    print(f"{report['model']}, input {'x'.join(map(str, report['input']))}{what}\n")
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        cells = [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))]
        print("  ".join(cells).rstrip())
    for note in notes:
        print(note)


def attention(request: Request) -> dict[str, Any]:
    """Report the memory of the attention matrices in float32, computed on the meta device."""
    model = build(request, device="meta")
    shape = input_shape(request, model)
    matrices = attention_matrices(model, torch.zeros(shape, device="meta"))
    stored = {name: FLOAT32 * matrix.elements() for name, matrix in matrices.items()}
    report = {
        "model": request.model,
        "input": shape,
        "layers": {name: {"shapes": m.shapes, "fused": m.fused, "bytes": stored[name]} for name, m in matrices.items()},
        "stored_bytes": sum(stored.values()),
        "largest_layer_bytes": max(stored.values(), default=0),
        "fused_bytes": sum(FLOAT32 * m.rows() if m.fused else stored[name] for name, m in matrices.items()),
    }
    if request.prints:
        print_attention(report)
    return report


def print_attention(report: dict[str, Any]) -> None:
    """Print a line for each layer, and the sums."""
    what = ": attention matrices in float32"
    if not report["layers"]:
        note = "none was seen: no attention in it runs through vitkit's core or PyTorch's fused kernel"
        print_table(report, what, [], [note])
        return
    lines = [["layer", "batch x heads x queries x keys", "", "MiB"]]
    for name, layer in report["layers"].items():
        shapes = Counter("x".join(map(str, shape)) for shape in layer["shapes"])
        text = ", ".join(shape if count == 1 else f"{count} of {shape}" for shape, count in shapes.items())
        lines.append([name, text, "fused" if layer["fused"] else "stored", f"{layer['bytes'] / MIB:,.1f}"])
    notes = [
        f"\nstored, all layers', as a backward pass needs them: {size_text(report['stored_bytes'])}",
        f"stored, the largest layer's, as inference needs them: {size_text(report['largest_layer_bytes'])}",
        f"fused, a number per row and what no kernel fuses: {size_text(report['fused_bytes'])}",
        "Each matrix counts once; explicit softmax and dropout keep it up to three times.",
    ]
    print_table(report, what, lines, notes, left=3)


def training(request: Request) -> dict[str, Any]:
    """Report the memory of a training step on each of several GPUs; nothing is run, and no GPU is needed."""
    model = build(request, device="meta")
    shape = input_shape(request, model)
    config = request.config or {}
    spec, settings = config.get("optimizer", "AdamW"), config.get("train", {})
    optimizer = spec if isinstance(spec, str) else spec.get("type", "AdamW")
    states = OPTIMIZER_STATES.get(optimizer, 2)
    # A GPU for training has bfloat16, which "auto" chooses then.
    precision = settings.get("precision", "fp32").replace("auto", "bf16")
    checkpointing = settings.get("activation_checkpointing", False)
    report = {"model": request.model, "input": shape, "gpus": request.training, "optimizer": optimizer}
    report |= {"precision": precision, "activation_checkpointing": checkpointing, "kernels": countable_device()}
    activations = Activations(0)
    if request.counts_macs:
        activations = count_activations(model, shape, precision=precision, checkpointing=checkpointing)
    report |= {"saved_bytes": activations.saved, "recomputed_bytes": activations.recomputed}
    for strategy in ("ddp", "fsdp"):
        memory = training_memory(model, states=states, gpus=request.training, sharded=strategy == "fsdp")
        total = memory.total + activations.saved + activations.recomputed
        report[strategy] = asdict(memory) | {"total": total}
    if request.prints:
        print_training(report)
    return report


def print_training(report: dict[str, Any]) -> None:
    """Print the memory of each component, with DDP and FSDP side by side."""
    titles = {
        "weights": "weights",
        "gradients": "gradients",
        "optimizer": f"states of {report['optimizer']}",
        "gathered": "blocks that are unsharded while they compute",
    }
    lines = [["", "DDP", "FSDP"]]
    lines += [[title, *(size_text(report[s][key]) for s in ("ddp", "fsdp"))] for key, title in titles.items()]
    lines.append(["saved for the backward pass, without losses", *[size_text(report["saved_bytes"])] * 2])
    if report["activation_checkpointing"]:
        lines.append(["recomputed, of the largest block", *[size_text(report["recomputed_bytes"])] * 2])
    lines.append(["in all", *(size_text(report[strategy]["total"]) for strategy in ("ddp", "fsdp"))])
    note = (
        "\nWorkspaces of kernels and the allocator's gaps come on top. FSDP cuts each weight along its first dimension."
    )
    if report["kernels"] == "cpu":
        note += f"\nThe kernels are a CPU's: torch {torch.__version__} counts a GPU's only where there is one."
    if not report["activation_checkpointing"]:
        note += "\nLess for the backward pass: train.activation_checkpointing=true (of a config)."
    what = f": a training step on each of {report['gpus']}, {report['precision']}"
    print_table(report, what, lines, [note], left=1)


def size_text(size: int) -> str:
    """Return a number of bytes in MiB or GiB."""
    return f"{size / MIB:,.1f} MiB" if size < MIB * 1024 else f"{size / MIB / 1024:,.1f} GiB"


def table(request: Request) -> list[dict[str, Any]]:
    """Report all backbones, or those that match a pattern, beside their published figures.

    Raises:
        ConfigError: none matches.
    """
    names = variants_like(request.model)
    accuracies = published_accuracies(names) if request.plot else []  # counting takes minutes: errors come before
    width = max(map(len, names))
    form = f"{{:{width}}}  {{:>10}}  {{:>11}}  {{:>11}}  {{:>8}}  {{:>11}}  {{:>5}}".format
    if request.prints:
        print(form("backbone", "input", "parameters", "published M", "G MACs", "published G", "top-1"))
    report = []
    for name in names:
        report.append(row := count_variant(name, macs=request.counts_macs))
        if not request.prints:
            continue
        macs = "-" if row["macs"] is None else f"{row['macs'] / 1e9:.3f}"
        figures = [str(row["published"].get(key, "-")) for key in ("published_m", "published_g")]
        accuracy = f"{row['top1']:.1f}" if row["top1"] else "-"
        size = "x".join(map(str, row["input"][1:]))
        print(form(name, size, f"{row['parameters']:,}", figures[0], macs, figures[1], accuracy), flush=True)
        if "note" in row["published"]:
            print(f"    {row['published']['note']}")
    if request.plot:
        plot_accuracy(accuracies, request.plot)
        if request.prints:
            print(f"\nThe plot is {request.plot}.")
    return report


def published_accuracies(names: Sequence[str]) -> list[Accuracy]:
    """Return the published top-1 and MACs of the ImageNet-1k classifiers among some backbones.

    Raises:
        ConfigError: none of them has both.
    """
    sizes = r"(?<=_)(tiny|small|base|large|huge)(?=_|$)|(?<=resnet)\d+"
    classifiers = []
    for name in names:
        entry, macs, size = zoo_entry(name), published().get(name, {}).get("published_g"), re.search(sizes, name)
        if entry.get("dataset") == "ImageNet-1k" and macs and size:
            family, label = re.sub(sizes, "*", name), size[0] if size[0].isdigit() else size[0][0].upper()
            pretraining = "ImageNet-22k" if "22k" in entry["url"] else ""
            classifiers.append(Accuracy(family, label, 1e9 * macs, entry["published"]["top-1"], pretraining))
    if not classifiers:
        raise ConfigError("--plot: none of these backbones has a published top-1 on ImageNet-1k and published MACs.")
    return classifiers


def zoo_entry(name: str) -> dict[str, Any]:
    """Return the entry of the model zoo with a backbone's published weights; {} if there is none."""
    return model_zoo.index().get(published().get(name, {}).get("weights"), {})


def variants() -> list[str]:
    """Return the registered variants: names that are not classes."""
    return [name for name in BACKBONES.names() if BACKBONES.resolve(name)[0].__name__ != name]


def variants_like(pattern: str) -> list[str]:
    """Return the variants that match a pattern.

    Raises:
        ConfigError: no variant matches.
    """
    names = fnmatch.filter(variants(), pattern)
    if not names:
        raise ConfigError(f"no backbone matches {pattern!r}. {nearest(pattern, variants())}")
    return names


def clips(request: Request) -> list[dict[str, Any]]:
    """Report and plot what clip backbones cost by the number of frames and the crop size."""
    names, report = variants_like(request.model), []
    width = max(map(len, names))
    form = f"{{:{width}}}  {{:>6}}  {{:>4}}  {{:>8}}  {{:>18}}  {{:>18}}".format
    if request.prints:
        print(form("backbone", "frames", "crop", "G MACs", "saved in training", "attention matrices"))
    for name in names:
        for change, sizes in CLIPS.items():
            for frames, crop in sizes:
                cost = clip_cost(name, frames, crop)
                report.append({"model": name, "against": change, "frames": frames, "crop": crop, **asdict(cost)})
                if request.prints:
                    memory = size_text(cost.saved_bytes), size_text(cost.attention_bytes)
                    print(form(name, frames, crop, f"{cost.macs / 1e9:.1f}", *memory), flush=True)
    panels = []
    costs = (
        ("GMACs", "macs", 1e9),
        ("saved in training, GiB", "saved_bytes", 1024 * MIB),
        ("attention matrices, GiB", "attention_bytes", 1024 * MIB),
    )
    for title, key, unit in costs:
        for change in CLIPS:
            curves = {}
            for name in names:
                rows = [row for row in report if (row["model"], row["against"]) == (name, change)]
                curves[name] = [row[change] for row in rows], [row[key] / unit for row in rows]
            panels.append((change, title, curves))
    plot_costs(panels, request.clips)
    if request.prints:
        print(
            f"\nCosts of one clip in float32. Fused kernels store no attention matrices. The plot is {request.clips}."
        )
    return report


def count_variant(name: str, *, macs: bool = True) -> dict[str, Any]:
    """Count a backbone's parameters and its MACs on the input of its published figures."""
    model = build_backbone(name, device="cpu" if macs else "meta")
    figures = published().get(name, {})
    shape = figures.get("input", [3, 224, 224])
    counted = count_macs(model, torch.zeros(1, *shape)) if macs else None
    return {
        "backbone": name,
        "input": shape,
        "parameters": count_parameters(model)[""].total,
        "macs": counted and counted.total,
        "unknown": counted.unknown if counted else {},
        "published": figures,
        "top1": zoo_entry(name).get("published", {}).get("top-1"),
    }
