"""Two-stage Deformable DETR-R50 with one-to-many matching (H-DETR, Jia et al. 2022, https://arxiv.org/abs/2207.13080)
on COCO 2017, 12 epochs.

The 300 best locations are the model's queries. In training, the next 1500 become additional queries, six of which are
matched to each target; their losses are added. The paper's best models also have no dropout, mixed query selection and
look forward twice: see `dino.py`, to which these training queries can also be added.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/h_deformable_detr_r50.py
Reference: 43.7 box AP at 12 epochs without one-to-many matching; with the additions named above 47.0 without it and
           48.7 with it (original README). Here: not yet run.
"""

from vitkit.configs.deformable_detr import config as deformable_detr


def config():
    cfg = deformable_detr(refine_boxes=True, two_stage=True)
    cfg["model"]["training_queries"] = [dict(type="OneToManyQueries", num_queries=1500, repeats=6)]
    cfg["model"]["head"]["d_ffn"] = 2048
    cfg["data"]["images_per_gpu"] = 2
    cfg["schedule"]["drop_at_epochs"] = [11]
    cfg["train"].update(epochs=12, reference_batch_size=16)
    return cfg
