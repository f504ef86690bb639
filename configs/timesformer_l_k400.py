"""TimeSformer-L on Kinetics-400 (Bertasius et al. 2021, https://arxiv.org/abs/2102.05095): 96 frames, each 4th.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/timesformer_l_k400.py model.backbone.pretrained=FILE
           with the weights of a ViT-B/16 of ImageNet-21k
Reference: 80.6 top-1, 94.7 top-5 (original README); 1 clip x 3 crops. 7140 GMACs for the three
           crops.
           Here: not yet run.
"""

from vitkit.configs.parts.kinetics import timesformer


def config():
    return timesformer("timesformer_l", num_frames=96, sampling_rate=4)
