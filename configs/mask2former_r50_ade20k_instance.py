"""Mask2Former-R50 on ADE20K instance segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

The data is prepared by Mask2Former's prepare_ade20k_ins_seg.py.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_r50_ade20k_instance.py train.precision=bf16
Reference: 26.4 mask AP (original model zoo). 44.0 M parameters. Here: not yet run.
Weights:   maskformer2_R50_bs16_160k/model_final_67e945.pkl
"""

from vitkit.configs.mask2former_r50_ade20k_semantic import config as base
from vitkit.configs.parts.ade20k import INSTANCE, ade20k_instance
from vitkit.configs.parts.panoptic import with_instances


def config():
    return with_instances(base(), ade20k_instance(images_per_gpu=2), INSTANCE)
