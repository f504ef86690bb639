"""What a model costs, by part: parameters, multiply-adds, attention matrices, time and memory.

MODEL is a config file or a backbone's name; a backbone is a classifier unless num_classes=none.
Multiply-adds count once each, as in the papers: products, convolutions, attention and sampling, with norms as fvcore
estimates them; element-wise work, activations and softmax are not counted. Operators that are unknown are listed.

Examples:
    python tools/analyze.py swin_tiny
    python tools/analyze.py configs/detr_r50.py --size 800 1199 --depth 3
    python tools/analyze.py configs/deformable_detr_r50.py model.num_queries=100 --time --device cuda
    python tools/analyze.py --table "swin*"
    python tools/analyze.py configs/mask2former_swin_large_coco_instance.py --training 8 --size 1024 1024

How much memory the attention matrices take: a transformer of 48 layers of 16 heads on the pixels of an image, then on
14 x 14 patches of one (768 GiB and 112 MiB):
    python tools/analyze.py ViT patch_size=1 depth=48 num_heads=16 d_model=1024 pooling=mean class_token=false \\
        --size 128 128 --attention
    python tools/analyze.py ViT patch_size=16 depth=48 num_heads=16 d_model=1024 pooling=mean class_token=false \\
        --size 224 224 --attention
"""

import argparse
import fnmatch
import functools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit import BACKBONES, build_model, load_config, model_zoo
from vitkit.analysis import (
    OPTIMIZER_STATES,
    attention_matrices,
    count_parameters,
    kept_bytes,
    measure,
    parts,
    training_memory,
)
from vitkit.engine.settings import require
from vitkit.errors import ConfigError, VitkitError, error_line
from vitkit.flops import count_flops
from vitkit.models.classifier import Classifier
from vitkit.overrides import apply_override, split_override
from vitkit.registry import nearest

DETECTION_SIZE = (800, 1066)
"""Short side 800 of COCO's most frequent aspect ratio."""
TOLERANCE = 0.02
"""Of multiply-adds, against published ones."""
TITLES = ["variant", "input", "parameters", "original", "published M", "", "G mult-adds", "original", "published G", ""]
WIDTHS = [10, 11, 11, 11, 8, 11, 8, 11, 8]
"""Of all columns but the first."""
TABLE_LEGEND = """
original: counted of the original network, or of an independent one (model_zoo/backbones.json says which), multiply-adds
by fvcore as here. published: as printed. exact: equal to the original. ok: as published but for rounding, multiply-adds
within 2 %. original: multiply-adds are not within 2 % of the published figure, but of the original's."""
FLOAT32 = 4
MIB = 2**20


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a config file or a backbone's name; with --table a pattern of names")
    parser.add_argument("overrides", nargs="*", help="key.sub=value of a config, key=value of a backbone")
    parser.add_argument("--size", nargs=2, type=int, metavar=("H", "W"), help="of the images in pixels")
    parser.add_argument("--frames", type=int, metavar="T", help="of clips, for backbones that take them")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="images (1)")
    parser.add_argument("--depth", type=int, default=2, metavar="N", help="of the parts listed: 2 has head.encoder (2)")
    parser.add_argument("--attention", action="store_true", help="only the attention matrices; needs no memory itself")
    parser.add_argument("--time", action="store_true", help="run it: time and memory by part")
    parser.add_argument("--repeats", type=int, default=5, help="of --time (5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of --time (cpu)")
    parser.add_argument(
        "--training", type=int, metavar="GPUS",
        help="only the memory of a training step on so many GPUs: whole on each (DDP), and divided among them (FSDP)",
    )  # fmt: skip
    parser.add_argument("--table", action="store_true", help="all backbones beside their published figures")
    parser.add_argument("--no-flops", action="store_true", help="parameters only; counting runs the model once")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_intermixed_args(argv)
    if args.model is None and not args.table:
        parser.error("a model is needed: a config file or a backbone's name (or --table)")
    counts = (args.batch, args.repeats, 1 if args.training is None else args.training, args.frames or 1)
    if min(*counts, args.depth + 1, *(args.size or (1,))) < 1:
        parser.error("--size, --frames, --batch, --training and --repeats are at least 1, --depth at least 0")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        choices = ((args.table, table), (args.attention, attention), (args.training, training), (True, costs))
        report = next(of_model for chosen, of_model in choices if chosen)(args)
    except VitkitError as error:
        sys.exit(error_line(error))
    if args.json:
        print(json.dumps(report, indent=2))


@functools.cache
def published() -> dict[str, dict[str, Any]]:
    """Backbone variant -> what is published of it, and counted of its original, at which input."""
    path = Path(model_zoo.__file__).parent / "backbones.json"
    return json.loads(path.read_text(encoding="utf-8"))


def is_config(name: str) -> bool:
    """Whether it names a config file, and not a backbone.

    Raises:
        ConfigError: it names neither.
    """
    if name.endswith((".py", ".json")):
        return True
    if name not in BACKBONES:
        raise ConfigError(
            f"no backbone {name!r}, and no config file, which ends in .py. {nearest(name, BACKBONES.names())}"
        )
    return False


def build(name: str, overrides: Sequence[str] = (), *, device: str) -> nn.Module:
    """The model of a config file, or a backbone; in evaluation mode.

    Raises:
        ConfigError: there is no such file or backbone, or an override does not fit.
    """
    if is_config(name):
        config = load_config(name, overrides)
        require(config, "model")
        with torch.device(device):
            return build_model(config["model"]).eval()
    spec = {"type": name, "num_classes": published().get(name, {}).get("num_classes", 1000)}
    config = {"model": {"type": "Classifier", "backbone": spec}}
    for text in overrides:
        key, raw = split_override(text)
        apply_override(config, f"model.backbone.{key}", raw)
    with torch.device(device):
        return BACKBONES.build(config["model"]["backbone"]).eval()


def input_shape(args: argparse.Namespace, model: nn.Module) -> tuple[int, ...]:
    """(N, 3, [T,] H, W)."""
    usual = (3, *DETECTION_SIZE) if is_config(args.model) and not isinstance(model, Classifier) else (3, 224, 224)
    channels, *frames, height, width = published().get(args.model, {}).get("input", usual)
    frames = frames if args.frames is None else [args.frames]
    return (args.batch, channels, *frames, *(args.size or (height, width)))


def costs(args: argparse.Namespace) -> dict[str, Any]:
    """Parameters, multiply-adds, time and memory by part."""
    counting = not args.no_flops or args.time
    model = build(args.model, args.overrides, device="cpu" if counting else "meta")
    shape = input_shape(args, model)
    names = parts(model, args.depth)
    parameters = count_parameters(model)
    flops = None if args.no_flops else count_flops(model, torch.zeros(shape))
    measured = {}
    if args.time:
        model.to(args.device)
        measured = measure(model, torch.zeros(shape, device=args.device), names=names, repeats=args.repeats)
    rows = {}
    for name in names:
        row = asdict(parameters[name])
        row |= {} if flops is None else {"multiply_adds": flops.by_module[name]}
        row |= asdict(measured[name]) if name in measured else {}
        if any(row.values()):
            rows[name] = row
    report = {"model": args.model, "input": shape, "parts": rows}
    if flops is not None:
        report |= {"by_operator": flops.by_operator, "not_counted": flops.elementwise, "unknown": flops.unknown}
    if not args.json:
        print_costs(report, {name: type(model.get_submodule(name)).__name__ for name in rows}, args.device)
    return report


def print_costs(report: dict[str, Any], types: dict[str, str], device: str) -> None:
    print(f"{report['model']}, input {'x'.join(map(str, report['input']))}\n")
    columns = {
        "parameters": lambda row: f"{row['total']:,}",
        "trainable": lambda row: f"{row['trainable']:,}",
        "G multiply-adds": lambda row: f"{row['multiply_adds'] / 1e9:.3f}",
        "ms": lambda row: f"{row['seconds'] * 1e3:.1f}",
        "peak MiB": lambda row: f"{row['peak_bytes'] / MIB:.1f}",
        "kept MiB": lambda row: f"{row['kept_bytes'] / MIB:.1f}",
    }
    fields = ["total", "trainable", "multiply_adds", "seconds", "peak_bytes", "kept_bytes"]
    present = [(title, text, key) for (title, text), key in zip(columns.items(), fields) if key in report["parts"][""]]
    lines = [["part", "type", *(title for title, _, _ in present)]]
    for name, row in report["parts"].items():
        indent = "  " * (name.count(".") + 1 if name else 0)
        lines.append(
            [indent + (name.rpartition(".")[2] or "(all)"), types[name]]
            + [text(row) if key in row else "" for _, text, key in present]
        )
    print_table(lines)
    if "seconds" in report["parts"][""]:
        print(
            f"\nms: median of the forward pass on {device}. peak: tensors of the forward pass, above those before it."
        )
        print("kept: what a training step keeps for the backward pass.")
    if "by_operator" in report:
        counted = sorted(report["by_operator"].items(), key=lambda item: -item[1])
        print("\ncounted: " + ", ".join(f"{name} {count / 1e9:.3f} G" for name, count in counted if count))
        print("not counted, as in papers: " + (join_counts(report["not_counted"]) or "nothing"))
        if report["unknown"]:
            print(f"UNKNOWN, not counted: {join_counts(report['unknown'])}")


def join_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} x{count}" for name, count in sorted(counts.items()))


def print_table(lines: Sequence[Sequence[str]], *, left: int = 2) -> None:
    """Aligned columns, the first `left` of them to the left."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        cells = [text.ljust(w) if i < left else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths))]
        print("  ".join(cells).rstrip())


def attention(args: argparse.Namespace) -> dict[str, Any]:
    """The memory of the attention matrices, in float32, found on the meta device."""
    model = build(args.model, args.overrides, device="meta")
    shape = input_shape(args, model)
    matrices = attention_matrices(model, torch.zeros(shape, device="meta"))
    stored = {name: FLOAT32 * found.elements() for name, found in matrices.items()}
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
    print(f"{report['model']}, input {'x'.join(map(str, report['input']))}: attention matrices in float32\n")
    if not report["layers"]:
        print("none was seen: no attention in it runs through vitkit's core or PyTorch's fused kernel")
        return
    lines = [["layer", "batch x heads x queries x keys", "", "MiB"]]
    for name, layer in report["layers"].items():
        shapes = Counter("x".join(map(str, shape)) for shape in layer["shapes"])
        text = ", ".join(shape if count == 1 else f"{count} of {shape}" for shape, count in shapes.items())
        lines.append([name, text, "fused" if layer["fused"] else "stored", f"{layer['bytes'] / MIB:,.1f}"])
    print_table(lines, left=3)
    print(f"\nstored, all layers', as a backward pass needs them: {size_text(report['stored_bytes'])}")
    print(f"stored, the largest layer's, as inference needs them: {size_text(report['largest_layer_bytes'])}")
    print(f"fused, a number per row and what no kernel fuses: {size_text(report['fused_bytes'])}")
    print("Each matrix counts once; explicit softmax and dropout keep it up to three times.")


def training(args: argparse.Namespace) -> dict[str, Any]:
    """The memory of a training step on each of several GPUs, in float32."""
    model = build(args.model, args.overrides, device="cpu")
    shape = input_shape(args, model)
    spec = load_config(args.model, args.overrides).get("optimizer", "AdamW") if is_config(args.model) else "AdamW"
    optimizer = spec if isinstance(spec, str) else spec.get("type", "AdamW")
    states = OPTIMIZER_STATES.get(optimizer, 2)
    model.train()
    kept = 0 if args.no_flops else kept_bytes(lambda: model(torch.zeros(shape)), [model])
    report = {"model": args.model, "input": shape, "gpus": args.training, "optimizer": optimizer, "kept_bytes": kept}
    for strategy in ("ddp", "fsdp"):
        memory = training_memory(model, states=states, gpus=args.training, divided=strategy == "fsdp")
        report[strategy] = asdict(memory) | {"total": memory.total + kept}
    if not args.json:
        print_training(report)
    return report


def print_training(report: dict[str, Any]) -> None:
    print(
        f"{report['model']}, input {'x'.join(map(str, report['input']))}: a training step on each of {report['gpus']}\n"
    )
    titles = {
        "weights": "weights",
        "gradients": "gradients",
        "optimizer": f"states of {report['optimizer']}",
        "gathered": "blocks that are whole while they compute",
    }
    lines = [["", "DDP", "FSDP"]]
    lines += [[title, *(size_text(report[s][key]) for s in ("ddp", "fsdp"))] for key, title in titles.items()]
    lines.append(["kept for the backward pass, without losses", *[size_text(report["kept_bytes"])] * 2])
    lines.append(["in all", *(size_text(report[strategy]["total"]) for strategy in ("ddp", "fsdp"))])
    print_table(lines, left=1)
    print(
        "\nWorkspaces of kernels and the allocator's gaps come on top. FSDP cuts each weight along its first dimension."
    )


def size_text(size: int) -> str:
    return f"{size / MIB:,.1f} MiB" if size < MIB * 1024 else f"{size / MIB / 1024:,.1f} GiB"


@dataclass
class TableRow:
    """What is counted of a variant.

    Verdicts on parameters and multiply-adds are explained in `TABLE_LEGEND`; "" where there is no figure.
    """

    name: str
    input: list[int]
    parameters: int
    multiply_adds: int | None
    unknown: dict[str, int]

    def verdicts(self) -> tuple[str, str]:
        known = published().get(self.name, {})
        return judge_parameters(self.parameters, known), judge_flops(self.multiply_adds, known)


def judge_parameters(count: int, known: dict[str, Any]) -> str:
    if "parameters" in known:
        return "exact" if count == known["parameters"] else "DEVIATES"
    if "published_m" in known:
        last_digit = 10.0 ** -len(str(known["published_m"]).partition(".")[2])
        return "ok" if abs(count / 1e6 - known["published_m"]) <= last_digit else "DEVIATES"
    return ""


def judge_flops(count: int | None, known: dict[str, Any]) -> str:
    figures = {"ok": "published_g", "original": "counted_g"}
    figures = {verdict: known[key] for verdict, key in figures.items() if key in known}
    if count is None or not figures:
        return ""
    return next((v for v, figure in figures.items() if abs(count / 1e9 / figure - 1) <= TOLERANCE), "DEVIATES")


def table(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All variants, or those that match a pattern.

    Raises:
        ConfigError: none matches.
    """
    names = fnmatch.filter(variants(), args.model or "*")
    if not names:
        raise ConfigError(f"no backbone is like {args.model!r}. {nearest(args.model, variants())}")
    lines = [
        "variant",
        "input",
        "parameters",
        "original",
        "published M",
        "",
        "G multiply-adds",
        "original",
        "published G",
        "",
    ]
    widths = [max(map(len, names)), 12, 11, 11, 11, 8, 15, 8, 11, 8]
    report = []
    if not args.json:
        print_line(lines, widths)
    for name in names:
        row = table_row(name, flops=not args.no_flops)
        known = published().get(name, {})
        report.append(asdict(row) | {"published": known, "verdicts": row.verdicts()})
        if not args.json:
            print_line(table_cells(row, known), widths)
            if "note" in known:
                print(f"    {known['note']}")
            if row.unknown:
                print(f"    UNKNOWN, not counted: {join_counts(row.unknown)}")
    if not args.json:
        print(TABLE_LEGEND)
    return report


def variants() -> list[str]:
    """The registered variants: names that are not classes."""
    return [name for name in BACKBONES.names() if BACKBONES.resolve(name)[0].__name__ != name]


def table_row(name: str, *, flops: bool = True) -> TableRow:
    model = build(name, device="cpu" if flops else "meta")
    shape = published().get(name, {}).get("input", [3, 224, 224])
    counted = count_flops(model, torch.zeros(1, *shape)) if flops else None
    total = None if counted is None else counted.total
    return TableRow(name, shape, count_parameters(model)[""].total, total, {} if counted is None else counted.unknown)


def table_cells(row: TableRow, known: dict[str, Any]) -> list[str]:
    parameters, flops = row.verdicts()
    return [
        row.name,
        "x".join(map(str, row.input[1:])),
        f"{row.parameters:,}",
        f"{known['parameters']:,}" if "parameters" in known else "-",
        str(known.get("published_m", "-")),
        parameters,
        "-" if row.multiply_adds is None else f"{row.multiply_adds / 1e9:.3f}",
        str(known.get("counted_g", "-")),
        str(known.get("published_g", "-")),
        flops,
    ]


def print_line(cells: Sequence[str], widths: Sequence[int]) -> None:
    """One line at once, because the next may take a while to count."""
    texts = [
        cell.ljust(width) if i in (0, 1, 5, 9) else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths))
    ]
    print("  ".join(texts).rstrip(), flush=True)


if __name__ == "__main__":
    main()
