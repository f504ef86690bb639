"""Mask2Former-R50 on ADE20K semantic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_r50_ade20k_semantic.py train.precision=bf16
Reference: 47.2 mIoU, 49.2 mIoU with multi-scale and flip (original model zoo). 44.0 M parameters, 71 GMACs
           (paper). Here: not yet run.
Weights:   maskformer2_R50_bs16_160k/model_final_500878.pkl
"""

from vitkit.configs.mask2former_r50_coco_instance import config as base
from vitkit.configs.parts.ade20k import SEMANTIC, ade20k_semantic


def config():
    cfg = base()
    cfg["model"].update(tasks=["semantic"], **SEMANTIC)
    cfg["data"] = ade20k_semantic(images_per_gpu=2)
    cfg["schedule"] = dict(type="PolyLR", power=0.9)
    cfg["evaluator"] = dict(type="SemanticEvaluator")
    # The original's 160,000 steps of 16 images are 126.7 passes over the 20,210 images.
    cfg["train"].update(epochs=127, eval_every=4, best_metric="mIoU")
    return cfg
