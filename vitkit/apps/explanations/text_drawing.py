"""Draw the attention, position encodings, expected tokens and beams of models that read or write text."""

import textwrap
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from vitkit.apps.visualization.canvas import save_figure
from vitkit.io.folders import declare_output
from vitkit.io.output import writing
from vitkit.text.vocabulary import SPACE

_CELL = 0.3  # inches
_MARGIN = 1.6
_LONGEST_SIDE = 24.0
_MIN_WIDTH = 4.2
_PAGE_WIDTH = 16.0
"""The width in inches from which on the heads of a layer are drawn in several lines."""


def _figure(width: float, height: float, title: str) -> Figure:
    """Return a figure with its title wrapped to its width, and made taller for the title's further lines."""
    width = max(width, _MIN_WIDTH)
    lines = [part for line in title.splitlines() for part in textwrap.wrap(line, int(width * 11))]
    figure = Figure(figsize=(width, height + 0.17 * max(0, len(lines) - 1)), layout="constrained")
    figure.suptitle("\n".join(lines), fontsize="medium")
    return figure


def _labels(tokens: Sequence[str]) -> list[str]:
    """Return tokens as they are drawn: SPACE, which looks like a bar of a chart, as the sign for a visible space."""
    return [token.replace(SPACE, "\u2423") for token in tokens]


def draw_alignment(
    attention: Tensor, source_tokens: Sequence[str], target_tokens: Sequence[str], path: str | Path
) -> None:
    """Save a PNG of an alignment matrix (Bahdanau et al. 2015, figure 3): a row for each target token, a column for
    each source token, white where the target token attended.

    Args:
        attention: (T, S) in 0..1.
        source_tokens: S tokens.
        target_tokens: T tokens.
        path: the PNG's path; its folder is made.
    Raises:
        ValueError: the numbers of tokens differ from those of the rows and columns, or there are no tokens.
    """
    shape = (len(target_tokens), len(source_tokens))
    if tuple(attention.shape) != shape or 0 in shape:
        raise ValueError(
            f"attention: got {tuple(attention.shape)} for {shape[0]} written and {shape[1]} read tokens; expected one "
            "row and one column for each, at least one."
        )
    height, width = (_MARGIN + _CELL * count for count in shape)
    scale = min(1.0, _LONGEST_SIDE / max(height, width))
    figure = Figure(figsize=(max(width * scale + 0.8, 3.2), max(height * scale, 2.4)), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(np.asarray(attention), cmap="gray", vmin=0.0, vmax=1.0, aspect="equal")
    axes.set_xticks(range(shape[1]), _labels(source_tokens), rotation=90)
    axes.set_yticks(range(shape[0]), _labels(target_tokens))
    axes.xaxis.tick_top()
    axes.set_xticks(np.arange(shape[1]) - 0.5, minor=True)
    axes.set_yticks(np.arange(shape[0]) - 0.5, minor=True)
    axes.grid(which="minor", color="0.25", linewidth=0.4)
    axes.tick_params(which="both", length=0)
    figure.colorbar(shown, ax=axes, label="attention", shrink=min(1.0, 6 / max(height, width)))
    save_figure(figure, path, dpi=120)


def draw_heads(
    layers: Sequence[Sequence[np.ndarray]],
    rows: Sequence[str],
    columns: Sequence[str],
    path: str | Path,
    *,
    title: str = "",
    largest: float | None = None,
) -> None:
    """Save a PNG of attention matrices: a row of panels for each layer, a column for each head; several rows for each
    layer if one would be too wide to be read on a screen.

    All panels have one scale. It ends at the largest weight of the rows that see more than one token: a row that sees
    only one, such as a causal model's first, always has the weight 1.

    Args:
        layers: for each layer (heads, L, S), in 0..1.
        rows: L tokens that attend.
        columns: S tokens that are attended to.
        path: the PNG's path; its folder is made.
        title: the figure's title.
        largest: the end of the scale in place of that.
    """
    most, highest = max(len(heads) for heads in layers), max(float(heads.max()) for heads in layers)
    if largest is None:
        largest = max(float(heads[(heads > 0).sum(-1) > 1].max(initial=0)) for heads in layers) or 1.0
    width, height = (max(1.2, 0.16 * len(tokens)) for tokens in (columns, rows))
    across = max(n for n in range(1, most + 1) if n == 1 or (most % n == 0 and n * (width + 0.2) + 2.0 <= _PAGE_WIDTH))
    if across < most:
        height = max(0.6, 0.16 * len(rows))
    lines = [(number, heads, k) for number, heads in enumerate(layers) for k in range(0, len(heads), across)]
    scale = min(1.0, 3 * _LONGEST_SIDE / max(across * width, len(lines) * height))
    figure = _figure(scale * across * (width + 0.2) + 2.0, scale * len(lines) * (height + 0.25) + 1.6, title)
    axes = figure.subplots(len(lines), across, squeeze=False)
    for i, (line, (number, heads, first)) in enumerate(zip(axes, lines)):
        for k, (axis, weights) in enumerate(zip(line, heads[first:]), start=first):
            shown = axis.imshow(weights, cmap="magma", vmin=0, vmax=largest, aspect="auto")
            axis.set_xticks([])
            axis.set_yticks([])
            if i == 0 or across < most:
                axis.set_title(f"head {k}", fontsize="small")
            if i == len(lines) - 1:
                axis.set_xticks(range(len(columns)), _labels(columns), rotation=90, fontsize=6)
        line[0].set_yticks(range(len(rows)), _labels(rows), fontsize=6)
        line[0].set_ylabel(f"layer {number}", fontsize="small")
    extend = "max" if highest > largest else "neither"
    figure.colorbar(shown, ax=axes, label="attention", extend=extend, shrink=min(1.0, 6 / figure.get_figheight()))
    save_figure(figure, path, dpi=120)


def draw_arcs(
    heads: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    path: str | Path,
    *,
    title: str = "",
    min_share: float = 0.2,
) -> None:
    """Save a PNG of attention as lines between two columns of tokens, a panel for each head (Vig 2019,
    https://arxiv.org/abs/1906.05714).

    Args:
        heads: (heads, L, S) in 0..1.
        rows: the L tokens on the left, which attend.
        columns: the S tokens on the right, which are attended to.
        path: the PNG's path; its folder is made.
        title: the figure's title; a line that says which weights have no line is added.
        min_share: weights below this fraction of the largest weight of their row get no line.
    """
    across = min(4, len(heads))
    down = -(-len(heads) // across)
    longest = max(len(rows), len(columns))
    title = f"{title}\nNo line: below {min_share:.0%} of the row's largest weight"
    figure = _figure(2.4 * across + 0.3, (0.19 * longest + 0.5) * down + 0.4, title)
    for k, weights in enumerate(heads):
        axis = figure.add_subplot(down, across, k + 1)
        axis.set(xlim=(-0.9, 1.9), ylim=(longest - 0.5, -0.5))
        axis.set_axis_off()
        axis.set_title(f"head {k}", fontsize="small")
        i, j = np.nonzero(weights >= min_share * weights.max(-1, keepdims=True))
        lines = [[(0, start), (1, end)] for start, end in zip(i, j)]
        axis.add_collection(LineCollection(lines, colors=f"C{k % 10}", alpha=weights[i, j].clip(0.1, 1), linewidths=2))
        for tokens, x, side in ((rows, -0.05, "right"), (columns, 1.05, "left")):
            for i, token in enumerate(_labels(tokens)):
                axis.text(x, i, token, ha=side, va="center", fontsize=7)
    save_figure(figure, path, dpi=130)


def draw_positions(codes: Tensor, path: str | Path, *, title: str = "") -> None:
    """Save a PNG of position encodings: a row for each position, a column for each channel.

    Args:
        codes: (positions, d_model).
        path: the PNG's path; its folder is made.
        title: the figure's title.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    limit = float(codes.abs().max())
    shown = axis.imshow(np.asarray(codes), cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    axis.set(title=title, xlabel="channel", ylabel="position")
    figure.colorbar(shown, ax=axis)
    save_figure(figure, path, dpi=120)


def draw_expected(
    steps: Sequence[tuple[str, Sequence[str], Sequence[float]]],
    path: str | Path,
    *,
    title: str = "",
    before: str = "after",
) -> None:
    """Save a PNG of the most probable tokens of each step.

    Args:
        steps: for each step the previous token, the most probable tokens, and their probabilities.
        path: the PNG's path; its folder is made.
        title: the figure's title.
        before: the word before the token in each panel's title.
    """
    across = min(6, len(steps))
    down = -(-len(steps) // across)
    figure = _figure(max(2.3 * across, 5), 1.5 * down + 0.5, title)
    for number, (token, tokens, probabilities) in enumerate(steps, start=1):
        axis = figure.add_subplot(down, across, number)
        ranks = range(len(tokens))
        axis.barh(ranks, probabilities, color="tab:blue")
        axis.set_yticks(ranks, _labels(tokens), fontsize=7)
        axis.set(xlim=(0, 1), ylim=(len(tokens) - 0.5, -0.5), xticks=[])
        for rank, p in zip(ranks, probabilities):
            color = "white" if p > 0.85 else "black"  # in the bar or beside it
            axis.text(min(p + 0.03, 0.75), rank, f"{p:.2f}", va="center", fontsize=6, color=color)
        axis.set_title(f"{number}: {before} {_labels([token])[0]}", fontsize=7)
    save_figure(figure, path, dpi=120)


def animate_decoding(
    source: Sequence[str],
    written: Sequence[str],
    attention: Tensor,
    steps: Sequence[tuple[str, Sequence[str], Sequence[float]]],
    path: str | Path,
    *,
    milliseconds: int = 900,
) -> None:
    """Save a GIF of decoding: a frame for each written token, with the source shaded by attention, the tokens written
    so far, and the most probable next tokens.

    Args:
        source: the S tokens of the source.
        written: the T tokens that are written.
        attention: (T, S) in 0..1, what each written token attends to.
        steps: for each written token the previous token, the most probable tokens, and their probabilities.
        path: the GIF's path; its folder is made.
        milliseconds: the time that each frame is shown; the last one is shown three times as long.
    """
    source_ends, written_ends = ([0, *accumulate(len(token) + 2.5 for token in tokens)] for tokens in (source, written))
    letters = max(source_ends[-1], written_ends[-1])
    width = max(6.0, 0.1 * letters + 1)
    frames = []
    for t, (weights, (_, tokens, probabilities)) in enumerate(zip(attention.tolist(), steps[: len(written)])):
        figure = Figure(figsize=(width, 3.4), dpi=80, layout="constrained")
        sentences, bars = figure.subplots(2, 1, height_ratios=(1, 1.2))
        sentences.set(xlim=(-7, letters), ylim=(-0.6, 1.6))
        sentences.set_axis_off()
        for y, name in ((1, "reads"), (0, "writes")):
            sentences.text(-1, y, name, ha="right", va="center", fontsize=9)
        for x, token, weight in zip(source_ends, _labels(source), weights):
            # Orange whose largest fraction is still light enough for black letters.
            box = dict(facecolor=(1.0, 1 - 0.45 * weight, 1 - weight), edgecolor="0.8")
            sentences.text(x, 1, token, va="center", fontsize=9, bbox=box)
        for k, (x, token) in enumerate(zip(written_ends, _labels(written[: t + 1]))):
            sentences.text(x, 0, token, va="center", fontsize=9, weight="bold" if k == t else "normal")
        ranks = range(len(tokens))
        colors = ["tab:green" if token == written[t] else "tab:blue" for token in tokens]
        bars.barh(ranks, probabilities, color=colors)
        bars.set_yticks(ranks, _labels(tokens), fontsize=8)
        bars.set(xlim=(0, 1), ylim=(len(tokens) - 0.5, -0.5), xlabel="probability of the next token; green: written")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        frames.append(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy()))
    durations = [milliseconds] * (len(frames) - 1) + [3 * milliseconds]
    declare_output(Path(path))
    with writing(Path(path)) as temporary:
        frames[0].save(temporary, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)


def draw_beams(
    nodes: Sequence[tuple[int, str, int | None, float, bool]], path: str | Path, *, root: str = "<s>", title: str = ""
) -> None:
    """Save a PNG of the beams as a tree, the best hypothesis in green on top, others in the order of their parents.

    Args:
        nodes: step, token, index of the parent in `nodes` (None: the beginning), summed log probability, and whether
            the best hypothesis goes through the node.
        path: the PNG's path; its folder is made.
        root: what all hypotheses begin with.
        title: the figure's title.
    """
    steps = max(step for step, *_ in nodes)
    corners = beam_corners(nodes)
    labels = _labels([token for _, token, *_ in nodes])
    most = 1 - min(y for _, y in corners)
    width = max(1.0, 0.1 * max(map(len, labels)) + 0.3)  # of a step, in inches
    figure = _figure(min(width * steps + 1.5, 60), 0.5 * most + 1.0, title)
    axis = figure.subplots()
    axis.set(xlim=(-0.5, steps + 0.6), ylim=(0.6 - most, 0.6))
    axis.set_axis_off()
    axis.text(0, 0, root, ha="center", va="center", fontsize=8)
    for (x, y), token, (_, _, parent, log_prob, is_best) in zip(corners, labels, nodes):
        start = (0, 0) if parent is None else corners[parent]
        color = "tab:green" if is_best else "0.6"
        axis.plot([start[0] + 0.2, x - 0.25], [start[1], y], color=color, linewidth=2 if is_best else 0.8, zorder=0)
        axis.text(x, y, token, ha="center", va="bottom", fontsize=8, color="black" if is_best else "0.35")
        axis.text(x, y, f"{log_prob:.1f}", ha="center", va="top", fontsize=6, color="0.5")
    save_figure(figure, path, dpi=120)


def beam_corners(nodes: Sequence[tuple[int, str, int | None, float, bool]]) -> list[tuple[int, int]]:
    """Return (step, y) of each node of `draw_beams`: the best hypothesis at 0, others below in their parents' order."""
    corners: dict[int | None, tuple[int, int]] = {None: (0, 0)}
    for step in sorted({step for step, *_ in nodes}):
        of_step = [k for k, node in enumerate(nodes) if node[0] == step]
        has_best = any(nodes[k][4] for k in of_step)
        of_step.sort(key=lambda k: (not nodes[k][4], -corners[nodes[k][2]][1]))
        # After its end, the line of the best hypothesis stays free.
        corners |= {k: (step, -rank) for rank, k in enumerate(of_step, start=0 if has_best else 1)}
    return [corners[k] for k in range(len(nodes))]
