"""Key names of the checkpoints that DINO's training writes (Caron et al. 2021): student, teacher and center."""

from vitkit.model_zoo.converters.key_table import Alias, Format, KeyTable, Rename

TRANSFORMERS: list[Format] = []
OFFICIAL = [
    Format(
        "facebookresearch/dino training",
        KeyTable(
            [
                Rename("^student.module.", "^student."),  # of DDP; the teacher's only if it has batch norms
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
