"""fundamentalvision/Deformable-DETR's checkpoints."""

from torch import nn

from vitkit.model_zoo.converter import Converter, State


def fit_variant(state: State, model: nn.Module) -> State:
    """Puts the box heads where vitkit has them, without the second names of shared tensors."""
    # Only a decoder that refines, or has a first stage before it, holds heads itself, as second names of them.
    refines = any(key.startswith("head.decoder.bbox_embed.") for key in state)
    two_stage = "head.proposals.enc_output.weight" in state
    state = {key: value for key, value in state.items() if not key.startswith("head.decoder.class_embed.")}
    state = {key: value for key, value in state.items() if not key.startswith("head.decoder.bbox_embed.")}
    num_heads = sum(key.startswith("head.class_embed.") and key.endswith(".bias") for key in state)
    moved = {}
    for key, value in state.items():
        for name, place in (("class_embed", "head.class_embed"), ("bbox_embed", "head.decoder.bbox_embed")):
            prefix = f"head.{name}."
            if not key.startswith(prefix):
                continue
            index, rest = key.removeprefix(prefix).split(".", 1)
            if two_stage and int(index) == num_heads - 1:
                key = f"head.proposals.{name}.{rest}"
            elif refines or index == "0":
                key = f"{place}.{index}.{rest}"
            else:
                key = ""  # all layers share the first
            break
        if key:
            moved[key] = value
    return moved


def converters(classes: tuple[str, ...]) -> list[Converter]:
    """
    Args:
        classes: COCO's, on which all were trained.
    """
    return [
        Converter(
            name="fundamentalvision/Deformable-DETR",
            marks=("transformer.level_embed", "input_proj.0.0.weight", "bbox_embed.0.layers.0.weight"),
            renames=(
                (r"^backbone\.0\.(?:body\.)?", "backbone."),
                (r"^input_proj\.", "neck.levels."),
                (r"^transformer\.(enc_output|enc_output_norm|pos_trans|pos_trans_norm)\.", r"head.proposals.\1."),
                (r"^transformer\.", "head."),
                (r"^(head\.(?:en|de)coder\.layers\.\d+)\.(linear[12])\.", r"\1.ffn.\2."),
                (r"^(class_embed|bbox_embed|query_embed)\.", r"head.\1."),
            ),
            transform=fit_variant,
            classes=classes,
        )
    ]
