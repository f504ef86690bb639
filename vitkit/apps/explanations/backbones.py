"""Figures of what an image backbone attends to: class token, rollout, windows, local kernels, non-local arrows."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.apps.explanations.attention_locations import (
    KINDS,
    LocatedAttention,
    attention_names,
    backbone_of,
    locate_attention,
    spread,
)
from vitkit.apps.explanations.backbone_models import drop_training_parts
from vitkit.apps.explanations.drawing import NUM_ARROWS
from vitkit.apps.explanations.explain_options import ExplainRequest, Explanation, prepare_image_to_draw
from vitkit.apps.explanations.images import Point, attention_layers
from vitkit.apps.explanations.pages import backbone_page
from vitkit.apps.explanations.panels import Panel, draw_rows
from vitkit.apps.explanations.regions import attention_ratio
from vitkit.apps.inference.inputs import ImageLike
from vitkit.apps.inference.predictor import Predictor
from vitkit.errors import ConfigError, DataError
from vitkit.nn.local_relation import LocalRelation
from vitkit.nn.non_local import NonLocalBlock
from vitkit.protocols.model import child

MAX_HEADS = 12
MAX_LAYERS = 12
MAX_GROUPS = 8  # of LR-Net's kernels
MAX_KERNELS = 4  # layers of LR-Net whose kernels are drawn
MAX_STEPS = 8  # of the rollout
MASS = 0.6  # the fraction of the class token's attention in its masks, as in the figures of DINO
# The attention of all layers is recorded if the model's input has at most this many pixels, or for a ViT if its weights
# take at most this much memory.
MAX_PIXELS = 512**2
MAX_BYTES = 2 * 1024**3


def backbone_attention(predictor: Predictor, image: np.ndarray) -> list[LocatedAttention]:
    """Return the attention of a model's backbone in an image as from `Predictor.to_array`; see `locate_attention`.

    For a large image only the first and the last layer are recorded, because all layers would take gigabytes.

    Raises:
        DataError: the weights of a single layer of a ViT would take more than `MAX_BYTES`.
    """
    predictor = drop_training_parts(predictor)
    batch, names = predictor.prepare([image]).to(predictor.device), attention_names(predictor.model)
    inputs = predictor.inputs_of(batch, predictor.model)
    height, width = inputs["images"].shape[-2:]
    if (needed := estimate_layer_bytes(predictor.model, inputs["images"])) > MAX_BYTES:
        raise DataError(
            f"The attention weights of a single layer take {needed / 1024**3:.1f} GiB for {width} x {height} pixels; "
            f"the limit is {MAX_BYTES / 1024**3:.0f} GiB. Give a smaller size."
        )
    if is_large(predictor.model, inputs["images"]):
        names = spread(names, 2)
    return locate_attention(predictor.model, names=names, **inputs)


def is_large(model: nn.Module, images: Tensor) -> bool:
    """Whether the attention weights of all layers would take too much memory for images (B, C, H, W)."""
    if (one_layer := estimate_layer_bytes(model, images)) == 0:
        return images[0, 0].numel() > MAX_PIXELS
    return len(attention_names(model)) * one_layer > MAX_BYTES


def estimate_layer_bytes(model: nn.Module, images: Tensor) -> int:
    """Return the size of the attention weights of a ViT's layer in which every patch attends to all others; 0 for other
    backbones, which pool, or attend locally.
    """
    if not is_plain_vit(model):
        return 0
    num_tokens = images[0, 0].numel() // backbone_of(model).patch_size ** 2
    return 4 * model.get_submodule(attention_names(model)[0]).num_heads * num_tokens**2


def is_plain_vit(model: nn.Module) -> bool:
    """Whether a model's backbone is a ViT, vitkit's or timm's."""
    return backbone_of(model).patch_size is not None


def locate_in_input(predictor: Predictor, image: np.ndarray, point: Point) -> Point:
    """Map a pixel (x, y) of an image to the model's input, which is resized and cropped.

    Raises:
        DataError: the crop cuts the pixel off.
    """
    # Transforms take images only, so the point is sent through them as a white square.
    marked = np.zeros_like(image)
    radius = max(1, round(max(image.shape) / 100))
    x, y = (int(n) for n in point)
    marked[max(0, y - radius) : y + radius + 1, max(0, x - radius) : x + radius + 1] = 255
    weights = predictor.as_evaluated(marked)[..., 0].astype(float)
    if not weights.any():
        raise DataError(f"points: {x},{y} is cut off by the validation transforms. Give a point closer to the center.")
    rows, columns = np.indices(weights.shape)
    return tuple(float((axis + 0.5).ravel() @ weights.ravel() / weights.sum()) for axis in (columns, rows))


def has_located_attention(model: nn.Module) -> bool:
    """Whether `explain_backbone` draws anything for an image model.

    It draws nothing if queries are tokens of the backbone, whose attention is drawn as a decoder's.
    """
    return not attention_layers(model).num_joint_queries and any(
        isinstance(module, KINDS) for module in model.modules()
    )


def explain_backbone(predictor: Predictor, image: np.ndarray, request: ExplainRequest, result: Explanation) -> None:
    """Draw what points and the class token attend to in a model's backbone, and the other figures that apply to it."""
    predictor = drop_training_parts(predictor)
    layers = backbone_attention(predictor, image)
    model, shown = predictor.model, prepare_image_to_draw(predictor, image)
    has_class_token = backbone_of(model).has_class_token
    num_layers, backbone = len(attention_names(model)), child(model, "backbone") or model
    is_complete = len(layers) == num_layers
    if not is_complete:
        height, width = shown.shape[:2]
        result.notes.append(
            "only the first and the last layer are drawn, since all layers would take too much memory for "
            f"{width} x {height} pixels; give a smaller size to see them all"
        )
    middle = [(shown.shape[1] / 2, shown.shape[0] / 2)]
    points = [locate_in_input(predictor, image, point) for point in request.points] or middle
    kinds = {layer.name: model.get_submodule(layer.name) for layer in layers}
    local = [layer for layer in layers if isinstance(kinds[layer.name], LocalRelation)]
    drawn = spread([layer for layer in layers if layer not in local[:1]], MAX_LAYERS)  # the stem's cells are pixels

    draw_points(shown, drawn, points, result.file("points.png"), num_layers=num_layers)
    if has_class_token:
        draw_class_token(shown, drawn, result.file("class_token.png"), num_layers=num_layers)
        draw_class_token_masks(shown, layers[-1], result.file("class_token_masks.png"))
        for head, mask in enumerate(mask_mass(layers[-1].class_token())):
            name = f"class token, {layers[-1].label}, head {head}: share of the image with {MASS:.0%} of its attention"
            result.numbers[name] = float(mask.float().mean())
    else:
        result.notes.append(f"no figure of the class token: this {type(backbone).__name__} does not have exactly one")
    if not (is_complete and is_plain_vit(model) and all(layer.is_global for layer in layers)):
        result.notes.append(
            "no figure of the rollout: it needs the attention of all layers, each from all tokens to all tokens"
        )
    else:
        draw_rollout(shown, layers, points, result.file("rollout.png"), class_token=has_class_token)
    if local:
        if len(points) > 1:
            result.notes.append(f"the kernels are drawn at the first of the {len(points)} points only")
        kernels = spread(local[1:], MAX_KERNELS)
        draw_kernels(shown, model, kernels, points[0], result.file("kernels.png"), num_layers=num_layers)
    if isinstance(kinds[layers[0].name], NonLocalBlock):
        draw_arrows(shown, layers, points, result.file("non_local.png"))
    if request.html:
        shown_layers = spread(layers, MAX_LAYERS)
        page = backbone_page(shown_layers, class_token=has_class_token)
        title = f"What {type(backbone).__name__} attends to{left_out((len(shown_layers), num_layers, 'layers'))}"
        result.page(page, "backbone.html", title=title, image=shown)


def left_out(*counts: tuple[int, int | None, str]) -> str:
    """Return how many are drawn, such as "; 12 of 16 heads, 12 of 14 layers", or "" if all are.

    Args:
        counts: how many are drawn, how many there are (None: the same), and what they are.
    """
    parts = [f"{shown} of {total} {what}" for shown, total, what in counts if total is not None and shown < total]
    return f"; {', '.join(parts)}" if parts else ""


def draw_points(
    image: np.ndarray,
    layers: Sequence[LocatedAttention],
    points: Sequence[Point],
    path: Path,
    *,
    num_layers: int | None = None,
) -> Path:
    """Save a PNG of what each point attends to in each layer, with its window where attention has windows.

    Args:
        num_layers: the number of all layers of the model; None: `layers` are all.
    """
    rows, has_windows = [], False
    for i, point in enumerate(points):
        panels = [None if i else Panel("image", points=points)]
        for layer in layers:
            boxes = []
            if len(layer.weights) > 1:  # one group sees everything
                x0, y0, x1, y1 = layer.window_at(point)
                is_whole = x1 - x0 >= image.shape[1] and y1 - y0 >= image.shape[0]
                boxes = [] if is_whole else [(x0, y0, x1, y1)]
            has_windows |= bool(boxes)
            height, width = keys_size(layer)
            panels.append(
                Panel(
                    "" if i else f"{layer.label}, {height}\N{NO-BREAK SPACE}x\N{NO-BREAK SPACE}{width} keys",
                    layer.at(point).mean(0),
                    layer.covered,
                    points=[point],
                    first_point=i,
                    boxes_xyxy=boxes,
                )
            )
        rows.append((f"point {i + 1}", panels))
    title = "What a point attends to, layer by layer, mean of the heads"
    title += "; green: all that its window lets it see" if has_windows else ""
    draw_rows(image, rows, path, title=title + left_out((len(layers), num_layers, "layers")))
    return path


def keys_size(layer: LocatedAttention) -> tuple[int, int]:
    """Return (height, width) of the map of a layer's keys, which pooling may have made smaller than the image."""
    last = (layer.keys.nan_to_num() // layer.cell).flatten(0, -2).amax(0).int() + 1
    width, height = last.tolist()
    return min(height, layer.map_size[0]), min(width, layer.map_size[1])


def draw_class_token(
    image: np.ndarray,
    layers: Sequence[LocatedAttention],
    path: Path,
    *,
    num_layers: int | None = None,
    region: Tensor | None = None,
) -> Path:
    """Save a PNG of what the class token attends to: a row for each layer, a column for each head and their mean.

    Args:
        num_layers: the number of all layers of the model; None: `layers` are all.
        region: (H, W) bool, such as an object's mask, whose outline is drawn, with the maps' `attention_ratio` in it.
    """
    rows = []
    num_heads = max(layer.weights.shape[1] for layer in layers)
    for number, layer in enumerate(layers):
        maps = layer.class_token()
        named = [("mean", maps.mean(0)), *((f"head {i}", m) for i, m in enumerate(maps[:MAX_HEADS]))]
        panels = [Panel("" if number else name, weights, layer.covered) for name, weights in named]
        rows.append((layer.label, [None if number else Panel("image"), *_measure(panels, region)]))
    title = "What the class token attends to, by layer and head" + _add_measured_title(region)
    title += left_out((min(MAX_HEADS, num_heads), num_heads, "heads"), (len(layers), num_layers, "layers"))
    draw_rows(image, rows, path, title=title, panel=1.2)
    return path


def _measure(panels: Sequence[Panel], region: Tensor | None) -> list[Panel]:
    """Return panels of attention with the outline of a region and their `attention_ratio` in it; None: no region."""
    if region is None:
        return list(panels)
    ratios = [f"{float(attention_ratio(panel.weights, region, panel.covered)):.1f} x" for panel in panels]
    return [
        panel._replace(title=": ".join(filter(None, (panel.title, ratio))), outline=region.numpy())
        for panel, ratio in zip(panels, ratios)
    ]


def _add_measured_title(region: Tensor | None) -> str:
    return "" if region is None else "; x: attention inside the outline, relative to uniform attention"


def mask_mass(maps: Tensor, mass: float = MASS) -> Tensor:
    """Return a mask of each map's largest weights that together have this fraction of its sum.

    Args:
        maps: (heads, h, w), at least 0.
    Returns:
        (heads, h, w) bool.
    """
    values, order = maps.flatten(1).sort(dim=1, descending=True)
    before = values.cumsum(1) - values  # the sum of the larger weights
    masks = torch.zeros_like(values, dtype=torch.bool).scatter_(1, order, before < mass * values.sum(1, keepdim=True))
    return masks.view_as(maps)


def draw_class_token_masks(image: np.ndarray, layer: LocatedAttention, path: Path) -> Path:
    """Save a PNG of the class token's attention in each head of a layer as in DINO's figures (Caron et al. 2021,
    https://arxiv.org/abs/2104.14294, figures 1, 3 and 4): its map, and the image where `MASS` of its attention is."""
    maps = layer.class_token()
    masks, shown = mask_mass(maps), spread(range(len(maps)), MAX_HEADS)
    panels = [Panel(f"head {k}", maps[k], layer.covered) for k in shown]
    inside = [
        Panel(f"{masks[k].float().mean():.0%} of the image", image=_only_inside(image, masks[k], layer)) for k in shown
    ]
    rows = [("attention", [Panel("image"), *panels]), (f"{MASS:.0%} of it", [None, *inside])]
    title = f"Class token's attention in {layer.label}, by head, and where {MASS:.0%} of it is"
    draw_rows(image, rows, path, title=title + left_out((len(shown), len(maps), "heads")))
    return path


def _only_inside(image: np.ndarray, mask: Tensor, layer: LocatedAttention) -> np.ndarray:
    """Darken an image outside the cells of a mask (h, w) bool."""
    rows, columns = (np.arange(side) // layer.cell for side in image.shape[:2])
    inside = mask.numpy()[rows[:, None], columns[None, :]]
    return np.where(inside[..., None], image, (image * 0.2).astype(np.uint8))


def rollout_maps(layers: Sequence[LocatedAttention], tokens: Sequence[int]) -> list[Tensor]:
    """Return the attention rollout of tokens after each layer, each (tokens, h, w): how much of each location reached
    them.

    Args:
        layers: all layers of a model, each with global attention.
        tokens: indices of the tokens, where those without a position come first.
    """
    first = layers[0]
    steps = rollout(layer.weights[0] for layer in layers)
    return [first.on_map(0, reached[tokens, first.num_tokens :]) for reached in steps]


def draw_rollout(
    image: np.ndarray,
    layers: Sequence[LocatedAttention],
    points: Sequence[Point],
    path: Path,
    *,
    class_token: bool,
    region: Tensor | None = None,
) -> Path:
    """Save a PNG of the attention rollout of the class token, or of the points in models without one.

    Args:
        region: see `draw_class_token`.
    """
    chosen, first = spread(range(len(layers)), MAX_STEPS), layers[0]
    sources = [("class token", 0, [])] if class_token else []
    for i, point in enumerate(() if class_token else points):
        query = int((first.queries[0] - torch.tensor(point)).square().sum(-1).argmin())
        sources.append((f"point {i + 1}", first.num_tokens + query, [point]))
    maps = rollout_maps(layers, [token for _, token, _ in sources])
    rows = []
    for k, (name, _, marks) in enumerate(sources):
        panels = [
            Panel(f"blocks 1 to {i + 1}" if i else "block 1", maps[i][k], first.covered, points=marks, first_point=k)
            for i in chosen
        ]
        rows.append((name, [Panel("image", points=marks, first_point=k), *_measure(panels, region)]))
    title = "Attention rollout: what has reached the token through all layers so far" + _add_measured_title(region)
    draw_rows(image, rows, path, title=title + left_out((len(chosen), len(layers), "steps")))
    return path


def draw_kernels(
    image: np.ndarray,
    model: nn.Module,
    layers: Sequence[LocatedAttention],
    point: Point,
    path: Path,
    *,
    num_layers: int | None = None,
) -> Path:
    """Save a PNG of LR-Net's kernels: for each layer the geometry prior, and the weights at a point.

    Args:
        num_layers: the number of all layers of the model; None: `layers` are all.
    """
    rows = []
    for layer in layers:
        prior = model.get_submodule(layer.name).prior().detach().float().cpu()  # (groups, k, k)
        geometry = prior.flatten(1).softmax(1).view_as(prior)
        far = (layer.queries[:, 0] - torch.tensor(point)).square().sum(-1)
        nearest = int(far.argmin())
        outside = layer.keys[nearest].isnan().any(-1).view_as(prior[0])  # of the map
        kernels = layer.weights[nearest, :, 0].view_as(prior).masked_fill(outside, torch.nan)
        groups = range(min(MAX_GROUPS, len(prior)))
        of_groups = left_out((len(groups), len(prior), "groups"))
        for name, maps in ((f"geometry prior{of_groups}", geometry), ("at the point", kernels)):
            shown = [Panel(f"group {k}" if not rows else "", image=maps[k].numpy()) for k in groups]
            rows.append((f"{layer.label}: {name}", [None if rows else Panel("image", points=[point]), *shown]))
    title = "Local kernels: softmax of the geometry prior, and of prior and similarity at the point (each on its scale)"
    draw_rows(image, rows, path, title=title + left_out((len(layers), num_layers, "layers")), panel=1.1)
    return path


def draw_arrows(image: np.ndarray, layers: Sequence[LocatedAttention], points: Sequence[Point], path: Path) -> Path:
    """Save a PNG of the strongest locations of non-local blocks (Wang et al. 2018, figure 3), a row for each point."""
    rows, num_arrows = [], 0
    for i, point in enumerate(points):
        panels = []
        for layer in layers:
            weights = layer.at(point)[0]
            values, cells = weights.flatten().topk(min(NUM_ARROWS, weights.numel()))
            num_arrows = max(num_arrows, len(cells))
            ends = [
                ((c % weights.shape[1] + 0.5) * layer.cell, (c // weights.shape[1] + 0.5) * layer.cell)
                for c in cells.tolist()
            ]
            strengths = (values / values[0].clamp(min=1e-12)).clamp(min=0).tolist()
            arrows = [(point, end, strength) for end, strength in zip(ends, strengths)]
            panels.append(Panel(layer.label, arrows=arrows, points=[point], first_point=i))
        rows.append((f"point {i + 1}", panels))
    draw_rows(image, rows, path, title=f"The {num_arrows} locations that a non-local block weights most", panel=2.4)
    return path


def mean_distances(predictor: Predictor, images: Iterable[ImageLike]) -> dict[str, Tensor]:
    """Return each layer's mean attention distance over images, (heads,) in pixels of the model's input.

    Raises:
        ConfigError: the backbone has no attention with locations, or has negative weights, which have no mean distance.
    """
    model, names = predictor.model, attention_names(predictor.model)
    distances: dict[str, list[Tensor]] = {}
    for image in images:
        inputs = predictor.prepare([predictor.to_array(image)]).to(predictor.device).inputs
        # A large image takes a forward pass for each layer, so that only one layer's attention is in memory.
        for part in [[name] for name in names] if is_large(model, inputs["images"]) else [names]:
            for layer in locate_attention(model, names=part, **inputs):
                located = layer.weights[:, :, layer.num_tokens :, layer.num_tokens :]
                if (located < 0).any():
                    raise ConfigError(
                        f"images: {layer.label} has negative weights (dot products without a softmax), so a "
                        "distance averaged by weight has no meaning. Leave it out."
                    )
                distances.setdefault(layer.label, []).append(attention_distance(located, layer.queries, layer.keys))
    if not distances:
        name = type(child(predictor.model, "backbone") or predictor.model).__name__
        raise ConfigError(
            f"{name} has no attention over the image; expected ViT (also timm's), Swin, SwinV2, MViT, LRNet or "
            "NonLocalResNet."
        )
    return {name: torch.stack(of_images).mean(0) for name, of_images in distances.items()}


def rollout(layers: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield attention rollout (Abnar & Zuidema 2020, https://arxiv.org/abs/2005.00928) after each layer: the product
    over the layers so far of each layer's attention, averaged over its heads and mixed equally with the identity for
    the residual path.

    Args:
        layers: (heads, N, N) for each layer, first to last; rows sum to 1.
    Yields:
        (N, N): the fraction of each input token (column) that reaches each output token (row).
    """
    reached = None
    for weights in layers:
        mean = weights.float().mean(dim=0)
        mixed = torch.lerp(mean, torch.eye(len(mean), device=mean.device), 0.5)
        reached = mixed if reached is None else mixed @ reached
        yield reached


def attention_distance(weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Compute the mean attention distance of each head: the distance from query to key, averaged by attention weight
    and then over the queries (Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929, figure 7; Raghu et al. 2021,
    https://arxiv.org/abs/2108.08810).

    Args:
        weights: (G, heads, L, S) for G groups of tokens, each attending within itself.
        queries: (G, L, 2) positions, in any unit; nan: the query is padding and is ignored.
        keys: (G, S, 2) positions; nan: attention to the key is ignored.
    Returns:
        (heads,) in the unit of the positions.
    """
    distances = torch.cdist(queries.nan_to_num(), keys.nan_to_num())[:, None]  # (G, 1, L, S)
    counted = weights * ~keys.isnan().any(-1)[:, None, None]
    of_query = (counted * distances).sum(-1) / counted.sum(-1).clamp(min=1e-12)  # (G, heads, L)
    return of_query.transpose(1, 2)[~queries.isnan().any(-1)].mean(dim=0)
