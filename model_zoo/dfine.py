"""Key names of D-FINE and DEIM, the original's and the transformers library's, both ways."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from vitkit.errors import CheckpointError
from vitkit.model_zoo.converter import State
from vitkit.model_zoo.key_table import Alias, Custom, KeyTable, Rename, below
from vitkit.model_zoo.transformers_detectors import ENCODER_LAYER, layer_rules

_SIZE = 640
"""Height and width of the images that the original keeps the anchors of."""
_FUSION = ("fpn_blocks", "pan_blocks")


def _pairs(theirs: str, ours: str, conv: str, norm: str) -> list[tuple[str, str]]:
    """Return the names of a convolution and its batch norm in each of two projects' block of that name."""
    return [(f"{theirs}{conv}.", f"{ours}0."), (f"{theirs}{norm}.", f"{ours}1.")]


def _backbone_rules(stem: str, stages: str) -> Iterator[Rename]:
    """Yield the rules of the parts of HGNetv2 that timm names in another way in a model of features."""
    yield Rename(f"^{stem}", "^backbone.net.stem.")
    yield Rename(f"^{stages}{{i}}.", "^backbone.net.stages_{i}.")


def _scale_of(state: State, name: str) -> float | None:
    return float(state[name].flatten()[0]) if name in state else None


def _scales(prefixes: tuple[str, ...], attention: str, has_anchors: bool) -> Custom:
    """Return the rule of what follows from the settings: the scales of the distances, points per level, and anchors.

    Args:
        prefixes: the first is what the scales are read from; they are written with each.
        attention: the prefix of a layer's cross-attention, with {i} for its number.
        has_anchors: whether the anchors for images of `_SIZE` are written.
    """

    def read(state: State, model: nn.Module) -> State:
        theirs, ours = _scale_of(state, f"{prefixes[0]}reg_scale"), getattr(model.head.decoder, "reg_scale", None)
        if theirs is not None and ours is not None and theirs != ours:
            raise CheckpointError(
                f"the weights are for head.reg_scale={theirs:g}, but the model has {ours:g}: use the config of their "
                "size, or set model.head.reg_scale."
            )
        dropped = ("reg_scale", ".up", "num_points_scale", "anchors", "valid_mask", "decoder.project")
        return {key: value for key, value in state.items() if not key.endswith(dropped)}

    def write(state: State, model: nn.Module) -> State:
        decoder = model.head.decoder
        for prefix in prefixes:
            state[f"{prefix}up"] = torch.tensor([model.head.up])
            state[f"{prefix}reg_scale"] = torch.tensor([decoder.reg_scale])
        for i, layer in enumerate(decoder.layers):
            shares = [1 / points for points in layer.cross_attn.num_points for _ in range(points)]
            state[f"{attention.format(i=i)}num_points_scale"] = torch.tensor(shares)
        if has_anchors:
            boxes = _anchors([info.stride for info in model.neck.feature_info.values()])
            state["decoder.valid_mask"] = ((boxes > 0.01) & (boxes < 0.99)).all(-1, keepdim=True)
            state["decoder.anchors"] = torch.logit(boxes).where(state["decoder.valid_mask"], torch.inf)
        return state

    return Custom(read, write)


def _anchors(strides: Sequence[int]) -> Tensor:
    """Return the initial boxes of all locations of an image of `_SIZE`, (1, S, 4) cxcywh in 0..1."""
    levels = []
    for level, stride in enumerate(strides):
        centres = (torch.arange(_SIZE // stride) + 0.5) / (_SIZE // stride)
        points = torch.cartesian_prod(centres, centres).flip(-1)  # row by row, as (x, y)
        levels.append(torch.cat([points, torch.full_like(points, 0.05 * 2**level)], dim=-1))
    return torch.cat(levels)[None]


def _official_rules() -> Iterator[Rename]:
    yield from _backbone_rules("backbone.stem.", "backbone.stages.")
    layer = [("linear1.", "ffn.linear1."), ("linear2.", "ffn.linear2.")]
    yield Rename("^encoder.encoder.0.layers.0.", "^neck.encoder.")
    yield from below("neck.encoder.", "neck.encoder.", layer)
    for name in ("input_proj", "lateral_convs"):
        yield from below(f"encoder.{name}.{{i}}.", f"neck.{name}.{{i}}.", _pairs("", "", "conv", "norm"))
    for k in (1, 2):
        theirs, ours = "encoder.downsample_convs.{i}.0.", "neck.downsample_convs.{i}."
        yield from below(theirs, ours, _pairs(f"cv{k}.", f"cv{k}.", "conv", "norm"))
    for name in _FUSION:
        pairs = [pair for k in (1, 4) for pair in _pairs(f"cv{k}.", f"cv{k}.", "conv", "norm")]
        for k in (2, 3):
            pairs += _pairs(f"cv{k}.1.", f"cv{k}.conv.", "conv", "norm")
            for part in ("conv1.", "conv2."):
                pairs += _pairs(f"cv{k}.0.{part}", f"cv{k}.csp.{part}", "conv", "norm")
                theirs, ours = f"cv{k}.0.bottlenecks.{{j}}.{part}", f"cv{k}.csp.blocks.{{j}}.{part}"
                pairs += _pairs(theirs, ours, "conv", "norm")
        yield from below(f"encoder.{name}.{{i}}.", f"neck.{name}.{{i}}.", pairs)
    yield Rename("^decoder.decoder.layers.", "^head.decoder.layers.")
    yield from below("head.decoder.layers.{i}.", "head.decoder.layers.{i}.", layer)
    yield from below("decoder.input_proj.{i}.", "head.input_proj.{i}.", _pairs("", "", "conv", "norm"))
    yield from below(
        "decoder.",
        "",
        [
            ("enc_output.proj.", "head.proposals.enc_output."),
            ("enc_output.norm.", "head.proposals.enc_output_norm."),
            ("enc_score_head.", "head.proposals.class_embed."),
            ("enc_bbox_head.", "head.proposals.bbox_embed."),
            ("query_pos_head.", "head.decoder.query_pos_head."),
            ("dec_score_head.", "head.class_embed."),
            ("pre_bbox_head.", "head.decoder.bbox_embed."),
            ("dec_bbox_head.", "head.decoder.corner_embed."),
            ("decoder.lqe_layers.", "head.quality_embed."),
            ("denoising_class_embed.", "training_queries.denoising.label_embed."),
        ],
    )


OFFICIAL_DFINE = KeyTable(
    [
        _scales(("decoder.", "decoder.decoder."), "decoder.decoder.layers.{i}.cross_attn.", has_anchors=True),
        *_official_rules(),
    ]
)


def _transformers_backbone_rules() -> Iterator[Rename]:
    yield from _backbone_rules("model.backbone.model.embedder.", "model.backbone.model.encoder.stages.")
    block = "stages_{i}.blocks.{j}."
    modules = [f"stem.{name}." for name in ("stem1", "stem2a", "stem2b", "stem3", "stem4")]
    modules += ["stages_{i}.downsample.", f"{block}aggregation.{{k}}.", f"{block}layers.{{k}}."]
    modules += [f"{block}layers.{{k}}.conv{m}." for m in (1, 2)]
    for module in modules:
        pairs = [("convolution.", "conv."), ("normalization.", "bn.")]
        yield from below(f"backbone.net.{module}", f"backbone.net.{module}", pairs)


def _transformers_neck_rules() -> Iterator[Rename | Alias]:
    # Newer versions of the library have these names in memory.
    yield Alias("^model.encoder.aifi.", "^model.encoder.encoder.")
    for k in (1, 2):
        yield Alias(
            f"^model.encoder.encoder.0.layers.0.mlp.layers.{k - 1}.", f"^model.encoder.encoder.0.layers.0.fc{k}."
        )
    yield from layer_rules("model.encoder.encoder.0.", "neck.encoder.", ENCODER_LAYER, joined=["self_attn"])
    yield Rename("^neck.encoder.layers.0.", "^neck.encoder.")
    yield Rename("^model.encoder_input_proj.", "^neck.input_proj.")
    theirs, ours = "model.encoder.lateral_convs.{i}.", "neck.lateral_convs.{i}."
    yield from below(theirs, ours, _pairs("", "", "conv", "norm"))
    for k in (1, 2):
        theirs, ours = "model.encoder.downsample_convs.{i}.", "neck.downsample_convs.{i}."
        yield from below(theirs, ours, _pairs(f"conv{k}.", f"cv{k}.", "conv", "norm"))
    for name in _FUSION:
        pairs = [pair for k in (1, 4) for pair in _pairs(f"conv{k}.", f"cv{k}.", "conv", "norm")]
        for k in (2, 3):
            pairs += _pairs(f"conv{k}.", f"cv{k}.conv.", "conv", "norm")
            for part in ("conv1.", "conv2."):
                pairs += _pairs(f"csp_rep{k - 1}.{part}", f"cv{k}.csp.{part}", "conv", "norm")
                theirs, ours = f"csp_rep{k - 1}.bottlenecks.{{j}}.{part}", f"cv{k}.csp.blocks.{{j}}.{part}"
                pairs += _pairs(theirs, ours, "conv", "norm")
        yield from below(f"model.encoder.{name}.{{i}}.", f"neck.{name}.{{i}}.", pairs)


TRANSFORMERS_DFINE = KeyTable(
    [
        _scales(("model.decoder.",), "model.decoder.layers.{i}.encoder_attn.", has_anchors=False),
        # Second names of the decoder's heads.
        Alias("^class_embed.", "^model.decoder.class_embed."),
        Alias("^bbox_embed.", "^model.decoder.bbox_embed."),
        *_transformers_backbone_rules(),
        *_transformers_neck_rules(),
        *(
            Alias(f"^model.decoder.layers.{{i}}.mlp.layers.{k - 1}.", f"^model.decoder.layers.{{i}}.fc{k}.")
            for k in (1, 2)
        ),
        *layer_rules(
            "model.decoder.",
            "head.decoder.",
            [("self_attn_layer_norm.", "norm1."), ("final_layer_norm.", "norm3.")],
            joined=["self_attn"],
        ),
        *below(
            "model.",
            "",
            [
                ("decoder_input_proj.", "head.input_proj."),
                ("enc_output.0.", "head.proposals.enc_output."),
                ("enc_output.1.", "head.proposals.enc_output_norm."),
                ("enc_score_head.", "head.proposals.class_embed."),
                ("enc_bbox_head.", "head.proposals.bbox_embed."),
                ("decoder.query_pos_head.", "head.decoder.query_pos_head."),
                ("decoder.class_embed.", "head.class_embed."),
                ("decoder.pre_bbox_head.", "head.decoder.bbox_embed."),
                ("decoder.bbox_embed.", "head.decoder.corner_embed."),
                ("decoder.lqe_layers.", "head.quality_embed."),
                ("denoising_class_embed.", "training_queries.denoising.label_embed."),
            ],
        ),
    ]
)
