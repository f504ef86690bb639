"""TimeSformer-HR on Kinetics-400 (Bertasius et al. 2021, https://arxiv.org/abs/2102.05095): 16 frames of 448 x 448.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/timesformer_hr_k400.py model.backbone.pretrained=FILE
           with the weights of a ViT-B/16 of ImageNet-21k
Reference: 79.6 top-1, 94.0 top-5 (original README); 1 clip x 3 crops. 5110 GMACs for the three
           crops.
           Here: not yet run.
"""

from vitkit.configs.parts.kinetics import timesformer


def config():
    return timesformer("timesformer_hr", num_frames=16, sampling_rate=16, size=448, short_sides=(448, 512))
