"""Key names of the checkpoints of fundamentalvision/Deformable-DETR, and of IDEA-Research/DINO, which extends it."""

import re

from torch import nn

from vitkit.model_zoo.converter import Converter, State


def fit_variant(state: State, model: nn.Module) -> State:
    """Rename the box heads to vitkit's names, without the second names of shared tensors."""
    # Only a decoder that refines boxes, or follows a first stage, also has the heads, under second names.
    refines = any(key.startswith("head.decoder.bbox_embed.") for key in state)
    two_stage = "head.proposals.enc_output.weight" in state
    num_heads = sum(key.startswith("head.class_embed.") and key.endswith(".bias") for key in state)
    owners = {"class_embed": "head.class_embed", "bbox_embed": "head.decoder.bbox_embed"}
    moved = {}
    for key, value in state.items():
        match = re.match(r"head\.(class_embed|bbox_embed)\.(\d+)\.(.*)", key)
        if match:
            name, index, rest = match.groups()
            if two_stage and int(index) == num_heads - 1:
                moved[f"head.proposals.{name}.{rest}"] = value
            elif refines or index == "0":  # otherwise all layers share the first head
                moved[f"{owners[name]}.{index}.{rest}"] = value
        elif not key.startswith(("head.decoder.class_embed.", "head.decoder.bbox_embed.")):
            moved[key] = value
    return moved


def drop_second_names(state: State, model: nn.Module) -> State:
    """Keep one name of each head: DINO has each head under two names, and shared heads once for each layer."""
    expected = model.state_dict()
    kept = {}
    for key, value in state.items():
        if re.match(r"head\.(class|bbox)_embed\.", key):
            continue  # the decoder's heads are the same
        key = re.sub(r"^head\.decoder\.class_embed\.", "head.class_embed.", key)
        is_shared = re.match(r"head\.(class_embed|decoder\.bbox_embed)\.[1-9]", key) and key not in expected
        if not is_shared:
            kept[key] = value
    return kept


SHARED_RENAMES = (
    (r"^backbone\.0\.(?:body\.)?", "backbone."),
    (r"^input_proj\.", "neck.levels."),
    (r"^transformer\.(enc_output|enc_output_norm|pos_trans|pos_trans_norm)\.", r"head.proposals.\1."),
    (r"^transformer\.enc_out_(class|bbox)_embed\.", r"head.proposals.\1_embed."),
    (r"^transformer\.tgt_embed\.", "head.proposals.content."),
    (r"^label_enc\.", "training_queries.denoising.label_embed."),
    (r"^transformer\.", "head."),
    (r"^(head\.(?:en|de)coder\.layers\.\d+)\.(linear[12])\.", r"\1.ffn.\2."),
    (r"^(class_embed|bbox_embed|query_embed)\.", r"head.\1."),
)


def converters(classes: tuple[str, ...]) -> list[Converter]:
    """Return the converters.

    Args:
        classes: COCO's classes, on which all official weights were trained.
    """
    return [
        Converter(
            name="IDEA-Research/DINO",
            marks=("transformer.level_embed", "transformer.decoder.ref_point_head.layers.0.weight", "label_enc.weight"),
            renames=SHARED_RENAMES,
            transform=drop_second_names,
            classes=classes,
        ),
        Converter(
            name="fundamentalvision/Deformable-DETR",
            marks=("transformer.level_embed", "input_proj.0.0.weight", "bbox_embed.0.layers.0.weight"),
            renames=SHARED_RENAMES,
            transform=fit_variant,
            classes=classes,
        ),
    ]
