"""Print the reports of `vitkit analyze`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vitkit.apps.analysis.reports.api import AttentionMemory, Counted, ImageCosts, StepMemory
from vitkit.apps.analysis.reports.backbones import clip_costs, count_variant, plot_clip_costs
from vitkit.apps.analysis.reports.layers import Similarities
from vitkit.apps.analysis.reports.text import TextCosts
from vitkit.apps.analysis.reports.training import TrainingMacs

MIB = 2**20


def print_costs(costs: ImageCosts, device: str) -> None:
    """Print a line for each part, and the operators that were counted."""
    columns = [  # field, title, unit, format
        ("total", "parameters", 1, ",.0f"),
        ("trainable", "trainable", 1, ",.0f"),
        ("macs", "G MACs", 1e9, ".3f"),
        ("seconds", "ms", 1e-3, ".1f"),
        ("peak_bytes", "peak MiB", MIB, ".1f"),
        ("saved_bytes", "saved MiB", MIB, ".1f"),
    ]
    whole = costs.parts[""]
    columns = [column for column in columns if column[0] in whole]
    lines = [["part", "type", *(title for _, title, _, _ in columns)]]
    for name, row in insert_own_rows(costs.parts):
        numbers = [format(row[field] / unit, spec) if field in row else "" for field, _, unit, spec in columns]
        lines.append([indent_lines(name), costs.types.get(name, ""), *numbers])
    print_table(costs, "", lines)
    if "seconds" in whole:
        print(
            f"\nms: median of the forward pass on {device}. peak: tensors of the forward pass, above those before it."
        )
        print("saved: what a training step stores for the backward pass.")
    if costs.by_operator is not None:
        counted = sorted(costs.by_operator.items(), key=lambda item: -item[1])
        print("\ncounted: " + ", ".join(f"{name} {count / 1e9:.3f} G" for name, count in counted if count))
        print("not counted, as in papers: " + (join_counts(costs.not_counted) or "nothing"))
        if costs.unknown:
            print(f"UNKNOWN, not counted: {join_counts(costs.unknown)}")
    if costs.macs_by_fvcore is not None:
        print(f"counted by fvcore: {costs.macs_by_fvcore / 1e9:.3f} G")
    if costs.default_classes is not None:
        print(
            f"\nclasses: {costs.default_classes}, the model's default; a run has those of its data: model.num_classes=N"
        )
    if costs.training is not None:
        plural, one = ("clips", "a clip") if len(costs.input) == 5 else ("images", "an image")
        print("\n" + training_text(costs.training, plural, f" ({one} of {shape_text(costs.input[2:])})"))


def print_similarities(results: Sequence[Similarities]) -> None:
    """Print the last comparison: for layers of the first model, spread evenly, the nearest layers of the second."""
    result = results[-1]
    cka = torch.tensor(result.cka)
    if result.first == result.second:  # a layer is most like itself
        cka = cka.clone().fill_diagonal_(-1.0)
    print(f"CKA (linear, unbiased) of {len(result.layers)} layers of {result.first} on {result.num_images} images, and")
    print(f"the nearest of {len(result.other_layers)} layers of {result.second}:")
    width = max(map(len, result.layers))
    for i in sorted(set(torch.linspace(0, len(cka) - 1, 16).round().int().tolist())):
        value, j = cka[i].max(dim=0)
        print(f"  {result.layers[i]:{width}}  {value:.3f}  {result.other_layers[j]}")


def insert_own_rows(rows: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows and, below a part whose listed parts have fewer MACs than itself, the rest as "(itself)"."""
    for name, row in rows.items():
        yield name, row
        inside = [other.get("macs", 0) for part, other in rows.items() if part and part.rpartition(".")[0] == name]
        own = row.get("macs", 0) - sum(inside)
        if inside and own > 0:
            yield f"{name}.(itself)" if name else "(itself)", {"macs": own}


def indent_lines(name: str) -> str:
    """Return the last name of a part, indented by its depth."""
    return "  " * (name.count(".") + 1 if name else 0) + (name.rpartition(".")[2] or "(all)")


def join_counts(counts: dict[str, int]) -> str:
    """Return "add x3, relu x2"."""
    return ", ".join(f"{name} x{count}" for name, count in sorted(counts.items()))


def print_table(report: Counted, what: str, lines: Sequence[Sequence[str]], *, left: int = 2) -> None:
    """Print the model and its input, and below a table with the first `left` columns left-aligned."""
    size_from = f" (size: {report.size_from}; another by --size HxW)" if report.size_from else ""
    print(f"{report.model}, input {shape_text(report.input)}{what}{size_from}\n")
    print_aligned(lines, left=left)


def print_aligned(lines: Sequence[Sequence[str]], *, left: int = 2) -> None:
    """Print lines of cells in columns, the first `left` of them left-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        cells = [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))]
        print("  ".join(cells).rstrip())


def print_attention(memory: AttentionMemory) -> None:
    """Print a line for each layer, and the sums."""
    lines = [["layer", "batch x heads x queries x keys", "", "MiB"]]
    for name, layer in memory.layers.items():
        shapes = Counter(map(shape_text, layer["shapes"]))
        text = ", ".join(shape if count == 1 else f"{count} of {shape}" for shape, count in shapes.items())
        lines.append([name, text, "fused" if layer["fused"] else "stored", f"{layer['bytes'] / MIB:,.1f}"])
    print_table(memory, ": attention matrices in float32", lines if memory.layers else [], left=3)
    if not memory.layers:
        print("none was seen: no attention in it runs through vitkit's core or PyTorch's fused kernel")
        return
    print(f"\nstored, all layers', as a backward pass needs them: {size_text(memory.stored_bytes)}")
    print(f"stored, the largest layer's, as inference needs them: {size_text(memory.largest_layer_bytes)}")
    print(f"fused, a number per row and what no kernel fuses: {size_text(memory.fused_bytes)}")
    print("Each matrix counts once; explicit softmax and dropout keep it up to three times.")


def print_step_memory(memory: StepMemory) -> None:
    """Print the memory of each component, with DDP and FSDP side by side."""
    titles = {
        "weights": "weights",
        "gradients": "gradients",
        "optimizer": f"states of {memory.optimizer}",
        "gathered": "blocks that are unsharded while they compute",
    }
    both = memory.ddp, memory.fsdp
    lines = [["", "DDP", "FSDP"]]
    lines += [[title, *(size_text(each[key]) for each in both)] for key, title in titles.items()]
    lines.append(["saved for the backward pass, without losses", *[size_text(memory.saved_bytes)] * 2])
    if memory.activation_checkpointing:
        lines.append(["recomputed, of the largest block", *[size_text(memory.recomputed_bytes)] * 2])
    lines.append(["in all", *(size_text(each["total"]) for each in both)])
    print_table(memory, f": a training step on each of {memory.gpus}, {memory.precision}", lines, left=1)
    print(
        "\nWorkspaces of kernels and the allocator's gaps come on top. FSDP cuts each weight along its first dimension."
    )
    if memory.kernels == "cpu":
        print(f"The kernels are a CPU's: torch {torch.__version__} counts a GPU's only where there is one.")
    if not memory.activation_checkpointing:
        print("Less for the backward pass: train.activation_checkpointing=true (of a config).")


def print_text_costs(costs: TextCosts) -> None:
    """Print a line for each part: parameters, and M MACs in training and inference at each length."""
    lengths = list(costs.step)
    titles = [f"{kind} {length}" for kind in ("train", "infer") for length in lengths]
    lines = [["part", "type", "parameters", *titles]]
    for name, row in costs.parts.items():
        macs = [f"{row[kind][length] / 1e6:,.2f}" for kind in ("forward", "inference") for length in lengths]
        lines.append([indent_lines(name), costs.types[name], f"{row['total']:,}", *macs])
    print(f"{costs.model}: M MACs of one text, by its length in tokens\n")
    print_aligned(lines)
    if lengths:
        print(
            "\ntrain: the forward pass over a source and a target of that many tokens each, or over one text.\n"
            "infer: a source of that many tokens is read, if there is one, and as many are generated greedily, one "
            "after another; a model that fills masks predicts all at once.\n"
            "a training step, forward and backward: "
            + ", ".join(f"{macs / 1e6:,.2f} M at {length}" for length, macs in costs.step.items())
        )
    if (training := costs.training) is not None:
        per_token = short(training.forward / training.length)
        print(training_text(training, "texts", f" (a text of {training.length} tokens, {per_token} MACs per token)"))
    if costs.unknown:
        print(f"UNKNOWN, not counted: {', '.join(costs.unknown)}")


def training_text(cost: TrainingMacs, noun: str, note: str = "") -> str:
    """Return a line such as "training: 3 x 4.1 G MACs x 1.28 M images x 300 epochs = 4.7e18 MACs (9.4e18 FLOPs)"."""
    text = f"training: 3 x {short(cost.forward)} MACs{note} x {short(cost.samples)} {noun} x {cost.epochs} epochs"
    return f"{text} = {cost.macs:.2g} MACs ({2 * cost.macs:.2g} FLOPs)".replace("e+", "e")


def short(number: float) -> str:
    """Return a number in four digits with a prefix: "4.112 G", "128 k", "640"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g} {prefix}"
    return f"{number:.4g}"


def size_text(size: int) -> str:
    """Return a number of bytes in MiB or GiB."""
    return f"{size / MIB:,.1f} MiB" if size < MIB * 1024 else f"{size / MIB / 1024:,.1f} GiB"


def shape_text(shape: Sequence[int]) -> str:
    """Return "1x3x224x224"."""
    return "x".join(map(str, shape))


def table(names: Sequence[str], *, macs: bool, prints: bool) -> list[dict[str, Any]]:
    """Count backbones, and print each beside its published figures as soon as it is counted."""
    width = max(map(len, names))
    form = f"{{:{width}}}  {{:>10}}  {{:>11}}  {{:>11}}  {{:>8}}  {{:>11}}  {{:>5}}".format
    rows = []
    if prints:
        print(form("backbone", "input", "parameters", "published M", "G MACs", "published G", "top-1"))
    for name in names:
        rows.append(row := count_variant(name, macs=macs))
        if not prints:
            continue
        counted = "-" if row["macs"] is None else f"{row['macs'] / 1e9:.3f}"
        figures = [str(row["published"].get(key, "-")) for key in ("published_m", "published_g")]
        accuracy = f"{row['top1']:.1f}" if row["top1"] else "-"
        size = shape_text(row["input"][1:])
        print(form(name, size, f"{row['parameters']:,}", figures[0], counted, figures[1], accuracy), flush=True)
        if "note" in row["published"]:
            print(f"    {row['published']['note']}")
    return rows


def clips(names: Sequence[str], out: str | Path, *, prints: bool) -> list[dict[str, Any]]:
    """Count and plot what clip backbones cost, and print each row as soon as it is counted."""
    width = max(map(len, names))
    form = f"{{:{width}}}  {{:>6}}  {{:>4}}  {{:>8}}  {{:>18}}  {{:>18}}".format
    rows = []
    if prints:
        print(form("backbone", "frames", "crop", "G MACs", "saved in training", "attention matrices"))
    for row in clip_costs(names):
        rows.append(row)
        if prints:
            memory = size_text(row["saved_bytes"]), size_text(row["attention_bytes"])
            print(form(row["model"], row["frames"], row["crop"], f"{row['macs'] / 1e9:.1f}", *memory), flush=True)
    plot_clip_costs(rows, out)
    if prints:
        print(f"\nCosts of one clip in float32. Fused kernels store no attention matrices. The plot is {out}.")
    return rows
