"""DETR-R50 and Deformable DETR-R50 with denoising on COCO 2017, 50 epochs (DN-DETR, Li et al. 2022,
https://arxiv.org/abs/2203.01305).

In training, five copies of up to 20 targets are added to the queries. The noise moves the corners of a box, rather than
its center and size as in the paper. The paper's queries are learned anchor boxes (DAB-DETR,
https://arxiv.org/abs/2201.12329), which each layer refines, as in the second one here; the first has DETR's own.

Run:       torchrun --nproc-per-node 8 tools/train.py dn_detr_r50
Reference: the paper. Here: not yet run.
"""

from vitkit.configs.deformable_detr import config as deformable_detr
from vitkit.configs.detr_r50 import config as detr_r50

VARIANTS = {
    "dn_detr_r50": (dict(), "none published with these queries; 44.1 box AP at 50 epochs with the paper's"),
    "dn_deformable_detr_r50": (dict(deformable=True), "48.6 box AP at 50 epochs, with the paper's noise"),
}
"""Name -> arguments of `config`, and what is published."""


def config(deformable: bool = False):
    if deformable:
        cfg = deformable_detr()
        cfg["model"]["head"]["type"] = "DABDeformableDETRHead"
        cfg["optimizer"]["lr_multipliers"] = {"sampling_offsets": 0.1}  # no learned reference points
    else:
        cfg = detr_r50()
        cfg["schedule"]["drop_at_epochs"] = [40]
        cfg["train"]["epochs"] = 50
    cfg["model"]["training_queries"] = [
        dict(type="BoxDenoising", num_queries=100, contrastive=False, label_noise=0.4, box_noise=0.4),
    ]  # fmt: skip
    return cfg
