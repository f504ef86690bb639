"""Key names of the checkpoints that DINO's training writes (Caron et al. 2021): student, teacher and center."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitkit.model_zoo.converters.key_table import Alias, Custom, Format, KeyTable, Rename, State


def _wrap_teacher(state: State, model: nn.Module) -> State:
    """Name the teacher as DDP does, in which the original wraps one with batch norms."""
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return state
    return {
        key.replace("teacher.", "teacher.module.", 1) if key.startswith("teacher.") else key: value
        for key, value in state.items()
    }


TRANSFORMERS: list[Format] = []
OFFICIAL = [
    Format(
        "facebookresearch/dino training",
        KeyTable(
            [
                Custom(writing=_wrap_teacher),
                Rename("^student.module.", "^student."),  # of DDP
                Alias("^teacher.module.", "^teacher."),
                Rename("^teacher.backbone.", "^backbone."),
                Rename("^teacher.head.", "^head."),
                Rename("^dino_loss.center$", "^center$"),
            ]
        ),
        marks=("dino_loss.center", ".head.last_layer.weight_v"),
        model="SelfDistillation",
        parts=("student", "teacher", "dino_loss"),
    )
]
