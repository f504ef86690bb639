"""Key names of EoMT: tue-mps/eomt's, on timm's or the transformers library's ViT, and the library's; only read."""

import torch
from torch import nn

from vitkit.errors import CheckpointError
from vitkit.model_zoo.converters.key_table import Custom, Drop, Format, KeyTable, Rename, State, below
from vitkit.model_zoo.converters.vit import LIBRARY_DINO, join_projections


def _check_normalization(state: State, model: nn.Module) -> State:
    """Check how pixels are normalized.

    Raises:
        CheckpointError: the weights expect another normalization of pixels than the model's backbone.
    """
    for name, expected in dict(mean=model.backbone.pixel_mean, std=model.backbone.pixel_std).items():
        values = state.pop(f"encoder.pixel_{name}", None)
        if values is not None and not torch.allclose(values.flatten().float().cpu(), torch.tensor(expected), atol=1e-3):
            raise CheckpointError(
                f"encoder.pixel_{name}: the weights expect images normalized by {values.flatten().tolist()}; the "
                f"model normalizes by {list(expected)}: set model.backbone.pixel_{name}."
            )
    return state


def _add_batch_axis(state: State, model: nn.Module) -> State:
    positions = state.pop("embeddings.position_embeddings.weight", None)
    return state if positions is None else state | {"backbone.pos_embed": positions[None]}


TRANSFORMERS = [
    Format(
        "transformers EoMT",
        KeyTable(
            [
                Drop("^criterion."),
                Custom(_add_batch_axis),
                *below("", "backbone.", ["embeddings.", "layers.", ("layernorm.", "norm."), "norm."]),
                Rename("^query.", "^head.query_embed."),
                Rename("^class_predictor.", "^head.class_embed."),
                *(Rename(f"^mask_head.fc{k + 1}.", f"^head.mask_embed.{2 * k}.") for k in range(3)),
                Rename("^upscale_block.block.{i}.layernorm2d.", "^head.upscale.{i}.norm."),
                Rename("^upscale_block.block.", "^head.upscale."),
                *LIBRARY_DINO,
                Custom(join_projections),
            ]
        ),
        marks=("query.weight", "class_predictor.weight", "upscale_block.block.0.conv1.weight"),
    )
]
OFFICIAL = [
    Format(
        "tue-mps/eomt",
        KeyTable(
            [
                Rename("^network.", "^"),
                Drop("^criterion."),
                Custom(_check_normalization),
                Rename("^encoder.backbone.", "^backbone."),
                Rename("^q.", "^head.query_embed."),
                Rename("^class_head.", "^head.class_embed."),
                Rename("^mask_head.", "^head.mask_embed."),
                Rename("^upscale.", "^head.upscale."),
                *LIBRARY_DINO,
                Custom(join_projections),
            ]
        ),
        marks=(".class_head.weight", ".mask_head.0.weight", ".upscale.0.conv1.weight"),
    )
]
