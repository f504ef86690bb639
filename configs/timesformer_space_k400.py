"""TimeSformer with attention within each frame on Kinetics-400 (Bertasius et al. 2021,
https://arxiv.org/abs/2102.05095), 8 frames, each 32nd.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/timesformer_space_k400.py model.backbone.pretrained=FILE
           with the weights of a ViT-B/16 of ImageNet-21k
Reference: 76.9 top-1 (the paper's table 1); 1 clip x 3 crops. 86.1 M parameters, 140.7 GMACs a view.
           Here: not yet run.
"""

from vitkit.configs.parts.kinetics import timesformer


def config():
    return timesformer("timesformer_space")
