"""TimeSformer with axial attention over time, width and height on Kinetics-400 (Bertasius et al. 2021,
https://arxiv.org/abs/2102.05095), 8 frames, each 32nd.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/timesformer_axial_k400.py model.backbone.pretrained=FILE
           with the weights of a ViT-B/16 of ImageNet-21k
Reference: 73.5 top-1 (the paper's table 1); 1 clip x 3 crops. 157.0 M parameters. The paper gives no code.
           Here: not yet run.
"""

from vitkit.configs.parts.kinetics import timesformer


def config():
    return timesformer("timesformer_axial")
