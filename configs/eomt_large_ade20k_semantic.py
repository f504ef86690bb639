"""EoMT-L (DINOv2, 512x512) on ADE20K semantic segmentation (Kerssies et al. 2025, https://arxiv.org/abs/2503.19108).

Images are evaluated in windows of 512x512 along their long side, whose scores are averaged where they overlap.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/eomt_large_ade20k_semantic.py train.precision=fp16
Reference: 58.4 mIoU after 31 epochs (original model zoo). Here: not yet run.
Weights:   ade20k_semantic_eomt_large_512/resolve/main/pytorch_model.bin
"""

from vitkit.configs.eomt_large_coco_panoptic import config as base
from vitkit.configs.parts.ade20k import SEMANTIC, ade20k_semantic
from vitkit.configs.parts.eomt import covering_square


def config():
    cfg = base()
    cfg["model"].update(tasks=["semantic"], num_queries=100, things=None, **SEMANTIC)
    cfg["model"]["backbone"]["image_size"] = 512
    cfg["data"] = covering_square(ade20k_semantic(images_per_gpu=2), size=512)
    cfg["evaluator"] = dict(type="SemanticEvaluator")
    cfg["train"].update(epochs=31, best_metric="mIoU")
    return cfg
