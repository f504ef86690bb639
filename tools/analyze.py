"""Report what a model costs, by part: parameters, MACs, attention matrices, time and memory.

MODEL is a backbone's name, or a model: a name of the zoo, the folder or a checkpoint of a run, a config. A
backbone is a classifier unless num_classes=none. For a text model, MACs are counted at several lengths.
MACs (multiply-accumulate operations) are counted as in the papers: products, convolutions, attention and sampling,
with norms as fvcore estimates them; element-wise operations, activations and softmax are not counted. Operators that
are unknown are listed.

Examples:
    python tools/analyze.py swin_tiny
    python tools/analyze.py configs/detr_r50.py --size 800 1199 --depth 3
    python tools/analyze.py configs/deformable_detr_r50.py model.num_queries=100 --time --device cuda
    python tools/analyze.py --table "swin*"
    python tools/analyze.py configs/mask2former_swin_large_coco_instance.py train.precision=bf16 \\
        train.activation_checkpointing=true --training 8 --size 1024 1024
    python tools/analyze.py "timesformer_???*" --clips runs/timesformer_cost.png
    python tools/analyze.py configs/translation_transformer_multi30k.py --lengths 16 64 256

The memory of the attention matrices of a transformer with 48 layers of 16 heads, on the pixels of an image, and on its
14 x 14 patches (768 GiB and 112 MiB):
    python tools/analyze.py ViT patch_size=1 depth=48 num_heads=16 d_model=1024 classifier.pooling=mean \\
        class_token=false --size 128 128 --attention
    python tools/analyze.py ViT patch_size=16 depth=48 num_heads=16 d_model=1024 classifier.pooling=mean \\
        class_token=false --size 224 224 --attention
"""

import argparse
import fnmatch
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit import BACKBONES, build_model, model_zoo
from vitkit.analysis.activations import Activations, count_activations, countable_device
from vitkit.analysis.clips import CLIPS, clip_cost
from vitkit.analysis.macs import count_macs
from vitkit.analysis.memory import (
    OPTIMIZER_STATES,
    attention_matrices,
    count_parameters,
    measure,
    parts,
    training_memory,
)
from vitkit.config import config_names
from vitkit.config.overrides import apply_override, split_override
from vitkit.engine.settings import require
from vitkit.errors import ConfigError
from vitkit.inference import find_model, names_config_alone
from vitkit.inference.load import FoundModel
from vitkit.models.classifier import Classifier
from vitkit.registry import nearest
from vitkit.tools.analyze_text import takes_text, text_costs
from vitkit.tools.common import add_device, add_trust, errors_in_one_line, split_weights
from vitkit.visualization.costs import plot_costs

DETECTION_SIZE = (800, 1066)
"""Height and width of an image with short side 800 and COCO's most frequent aspect ratio."""
FLOAT32 = 4
MIB = 2**20


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a backbone's name or a model; with --table, a pattern of names")
    parser.add_argument("overrides", nargs="*", help="key.sub=value of a config, key=value of a backbone")
    parser.add_argument(
        "--size", nargs=2, type=int, metavar=("H", "W"), help="height and width of the images in pixels"
    )
    parser.add_argument("--frames", type=int, metavar="T", help="frames of a clip, for backbones that take clips")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="images in a batch (default: 1)")
    parser.add_argument(
        "--depth", type=int, default=2, metavar="N", help="depth of the parts: 2 includes head.encoder (default: 2)"
    )
    parser.add_argument(
        "--attention", action="store_true", help="report only the attention matrices, without allocating them"
    )
    parser.add_argument("--time", action="store_true", help="run the model and report time and memory by part")
    parser.add_argument("--repeats", type=int, default=5, help="runs that --time measures (default: 5)")
    add_trust(parser)
    add_device(parser, default="cpu")
    parser.add_argument(
        "--training",
        type=int,
        metavar="GPUS",
        help="report only the memory of a training step on this many GPUs: replicated (DDP) and sharded (FSDP)",
    )
    parser.add_argument("--table", action="store_true", help="list all backbones beside their published figures")
    parser.add_argument(
        "--clips",
        metavar="PNG",
        help="plot the MACs and memory of clip backbones by frames and crop size into this file; MODEL is a pattern "
        "of names",
    )
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help="text lengths in tokens, for text models")
    parser.add_argument(
        "--no-macs", "--no-flops", action="store_true", help="report parameters only; counting MACs runs the model once"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_intermixed_args(argv)
    args.weights, args.overrides = split_weights(args.overrides)
    if args.model is None and not args.table:
        parser.error("a model is needed: a config file or a backbone's name (or --table)")
    counts = (args.batch, args.repeats, 1 if args.training is None else args.training, args.frames or 1)
    if min(*counts, args.depth + 1, *(args.size or (1,)), *(args.lengths or (1,))) < 1:
        parser.error(
            "--size, --frames, --lengths, --batch, --training and --repeats are at least 1, --depth is at least 0"
        )
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        named = None if args.table or args.clips else find_named(args)
        args.config = named and named.config
        is_text = named is not None and takes_text(named.config)
        if args.lengths and not is_text:
            raise ConfigError("--lengths: only for models of text. Give the --size of images.")
        modes = ((args.table, table), (args.clips, clips), (is_text, partial(text_costs, named)))
        choices = (*modes, (args.attention, attention), (args.training, training), (True, costs))
        report = next(analyze for chosen, analyze in choices if chosen)(args)
    if args.json:
        print(json.dumps(report, indent=2))


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return backbone variant -> its published figures, those counted on the original code, and their input."""
    path = Path(model_zoo.__file__).parent / "backbones.json"
    return json.loads(path.read_text(encoding="utf-8"))


def is_config(name: str) -> bool:
    """Whether a name is that of a model with a config rather than that of a backbone."""
    return name not in BACKBONES


def find_named(args: argparse.Namespace) -> FoundModel | None:
    """Return the model that the arguments name, with its config, which is loaded only here; None for a backbone.

    Raises:
        ConfigError: there is no model of that name; the message lists the known names, including backbones.
    """
    if not is_config(args.model):
        return None
    if (
        names_config_alone(args.model)
        and not args.model.endswith((".py", ".json"))
        and args.model not in config_names()
    ):
        names = {*BACKBONES.names(), *config_names()}
        raise ConfigError(f"{args.model!r} is neither a backbone nor a model or a config. {nearest(args.model, names)}")
    named = find_model(args.model, args.weights, overrides=args.overrides, trust=args.trust)
    require(named.config, "model")
    return named


def build(args: argparse.Namespace, *, device: str) -> nn.Module:
    """Return the model of the config, or the backbone, in evaluation mode; raises like `build_backbone`."""
    if args.config is None:
        return build_backbone(args.model, args.overrides, device=device)
    with torch.device(device):
        return build_model(args.config["model"]).eval()


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


def input_shape(args: argparse.Namespace, model: nn.Module) -> tuple[int, ...]:
    """Return the shape of the input, (N, 3, [T,] H, W)."""
    default = (3, *DETECTION_SIZE) if is_config(args.model) and not isinstance(model, Classifier) else (3, 224, 224)
    channels, *frames, height, width = published().get(args.model, {}).get("input", default)
    frames = frames if args.frames is None else [args.frames]
    return (args.batch, channels, *frames, *(args.size or (height, width)))


def costs(args: argparse.Namespace) -> dict[str, Any]:
    """Report parameters, MACs, time and memory by part."""
    counting = not args.no_macs or args.time
    model = build(args, device="cpu" if counting else "meta")
    shape = input_shape(args, model)
    names = parts(model, args.depth)
    parameters = count_parameters(model)
    macs = None if args.no_macs else count_macs(model, torch.zeros(shape))
    measured = {}
    if args.time:
        model.to(args.device)
        measured = measure(model, torch.zeros(shape, device=args.device), names=names, repeats=args.repeats)
    rows = {}
    for name in names:
        row = asdict(parameters[name])
        row |= {} if macs is None else {"macs": macs.by_module[name]}
        row |= asdict(measured[name]) if name in measured else {}
        if any(row.values()):
            rows[name] = row
    report = {"model": args.model, "input": shape, "parts": rows}
    if macs is not None:
        report |= {"by_operator": macs.by_operator, "not_counted": macs.uncounted, "unknown": macs.unknown}
    if not args.json:
        print_costs(report, {name: type(model.get_submodule(name)).__name__ for name in rows}, args.device)
    return report


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


def attention(args: argparse.Namespace) -> dict[str, Any]:
    """Report the memory of the attention matrices in float32, computed on the meta device."""
    model = build(args, device="meta")
    shape = input_shape(args, model)
    matrices = attention_matrices(model, torch.zeros(shape, device="meta"))
    stored = {name: FLOAT32 * matrix.elements() for name, matrix in matrices.items()}
    report = {
        "model": args.model,
        "input": shape,
        "layers": {name: {"shapes": m.shapes, "fused": m.fused, "bytes": stored[name]} for name, m in matrices.items()},
        "stored_bytes": sum(stored.values()),
        "largest_layer_bytes": max(stored.values(), default=0),
        "fused_bytes": sum(FLOAT32 * m.rows() if m.fused else stored[name] for name, m in matrices.items()),
    }
    if not args.json:
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


def training(args: argparse.Namespace) -> dict[str, Any]:
    """Report the memory of a training step on each of several GPUs; nothing is run, and no GPU is needed."""
    model = build(args, device="meta")
    shape = input_shape(args, model)
    config = args.config or {}
    spec, settings = config.get("optimizer", "AdamW"), config.get("train", {})
    optimizer = spec if isinstance(spec, str) else spec.get("type", "AdamW")
    states = OPTIMIZER_STATES.get(optimizer, 2)
    # A GPU for training has bfloat16, which "auto" chooses then.
    precision = settings.get("precision", "fp32").replace("auto", "bf16")
    checkpointing = settings.get("activation_checkpointing", False)
    report = {"model": args.model, "input": shape, "gpus": args.training, "optimizer": optimizer}
    report |= {"precision": precision, "activation_checkpointing": checkpointing, "kernels": countable_device()}
    activations = Activations(0)
    if not args.no_macs:
        activations = count_activations(model, shape, precision=precision, checkpointing=checkpointing)
    report |= {"saved_bytes": activations.saved, "recomputed_bytes": activations.recomputed}
    for strategy in ("ddp", "fsdp"):
        memory = training_memory(model, states=states, gpus=args.training, sharded=strategy == "fsdp")
        total = memory.total + activations.saved + activations.recomputed
        report[strategy] = asdict(memory) | {"total": total}
    if not args.json:
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


def table(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Report all backbones, or those that match a pattern, beside their published figures.

    Raises:
        ConfigError: none matches.
    """
    names = variants_like(args.model or "*")
    width = max(map(len, names))
    form = f"{{:{width}}}  {{:>10}}  {{:>11}}  {{:>11}}  {{:>8}}  {{:>11}}".format
    if not args.json:
        print(form("backbone", "input", "parameters", "published M", "G MACs", "published G"))
    report = []
    for name in names:
        report.append(row := count_variant(name, macs=not args.no_macs))
        if args.json:
            continue
        macs = "-" if row["macs"] is None else f"{row['macs'] / 1e9:.3f}"
        figures = [str(row["published"].get(key, "-")) for key in ("published_m", "published_g")]
        size = "x".join(map(str, row["input"][1:]))
        print(form(name, size, f"{row['parameters']:,}", figures[0], macs, figures[1]), flush=True)
        if "note" in row["published"]:
            print(f"    {row['published']['note']}")
    return report


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
        raise ConfigError(f"no backbone is like {pattern!r}. {nearest(pattern, variants())}")
    return names


def clips(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Report and plot what clip backbones cost by the number of frames and the crop size."""
    names, report = variants_like(args.model), []
    width = max(map(len, names))
    form = f"{{:{width}}}  {{:>6}}  {{:>4}}  {{:>8}}  {{:>18}}  {{:>18}}".format
    if not args.json:
        print(form("backbone", "frames", "crop", "G MACs", "saved in training", "attention matrices"))
    for name in names:
        for change, sizes in CLIPS.items():
            for frames, crop in sizes:
                cost = clip_cost(name, frames, crop)
                report.append({"model": name, "against": change, "frames": frames, "crop": crop, **asdict(cost)})
                if not args.json:
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
    plot_costs(panels, args.clips)
    if not args.json:
        print(f"\nCosts of one clip in float32. Fused kernels store no attention matrices. The plot is {args.clips}.")
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
    }


if __name__ == "__main__":
    main()
