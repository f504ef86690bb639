"""Identifies the variant of a model from a state dict, for models whose variants' checkpoints are easily confused."""

from collections.abc import Iterable


def deformable_variant(names: Iterable[str]) -> str:
    """Return the variant of Deformable DETR or its successors that the names of a state dict belong to, such as "of 4
    levels with box refinement"; "" for other models."""
    names = set(names)
    if not any(name.startswith("neck.levels.") for name in names):
        return ""
    levels = sum(name.startswith("neck.levels.") and name.endswith(".0.weight") for name in names)
    box_positions = "head.decoder.ref_point_head.layers.0.weight" in names
    if "head.proposals.enc_output.weight" in names:
        stages = "in two stages" + (" with mixed query selection (DINO)" if box_positions else "")
    elif box_positions:
        stages = "with learned anchor boxes (DAB-DETR)"
    else:
        refines = "head.decoder.bbox_embed.1.layers.0.weight" in names
        stages = f"with{'' if refines else 'out'} box refinement"
    return f"of {levels} level{'s' if levels > 1 else ''} {stages}"
