"""MaskFormer-R50 on COCO 2017 panoptic segmentation (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/maskformer_r50_coco_panoptic.py
Reference: 46.5 PQ (original model zoo). 45.0 M parameters, 181 GMACs (paper). Here: not yet run.
Weights:   maskformer_panoptic_R50_bs64_554k/model_final_6f60dc.pkl
"""

from vitkit.configs.maskformer_r50_ade20k import config as base
from vitkit.configs.parts.coco_panoptic import PANOPTIC, coco_panoptic_multi_scale


def config():
    cfg = base()
    cfg["model"].update(tasks=["panoptic"], size_divisibility=1, **PANOPTIC)
    cfg["model"]["neck"] = dict(type="TransformerPixelDecoder", out_channels=256)
    cfg["data"] = coco_panoptic_multi_scale(images_per_gpu=8)
    # The original's 554,400 steps of 64 images are 300 passes over the 118,287 images; it drops after 369,600 of them.
    cfg["schedule"] = dict(type="MultiStepLR", drop_at_epochs=[200])
    cfg["evaluator"] = dict(type="PanopticEvaluator")
    cfg["train"].update(epochs=300, eval_every=1, reference_batch_size=64, best_metric="PQ")
    return cfg
