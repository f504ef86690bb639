"""TimeSformer with divided space-time attention on Kinetics-400 (Bertasius et al. 2021,
https://arxiv.org/abs/2102.05095), 8 frames, each 32nd.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/timesformer_divided_k400.py model.backbone.pretrained=FILE
           with the weights of a ViT-B/16 of ImageNet-21k
Reference: 78.0 top-1 (the paper's table 1); 77.9 top-1, 93.2 top-5 (original README); 1 clip x 3 crops.
           121.6 M parameters, 196.1 GMACs a view.
           Here: not yet run.
"""

from vitkit.configs.parts.kinetics import timesformer


def config():
    return timesformer("timesformer_divided")
