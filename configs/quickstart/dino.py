"""A small DINO on the synthetic world: no download, minutes on a CPU.

quickstart/deformable_detr.py with denoising, mixed query selection, look forward twice and shared heads.

Run:  python tools/train.py configs/quickstart/dino.py
Here: not yet run to its end.
"""

from vitkit.configs.quickstart.deformable_detr import config as deformable_detr


def config():
    cfg = deformable_detr()
    cfg["model"]["head"].update(
        mixed_selection=True, box_positions=True, look_forward_twice=True, share_heads=True, norm_outputs=True,
        logit_eps=1e-3, position_offset=0.0, position_temperature=20.0,
        denoising_queries=20, contrastive=True, label_noise=0.5, box_noise=1.0,
    )  # fmt: skip
    cfg["criterion"]["weights"]["labels"] = 1.0
    return cfg
