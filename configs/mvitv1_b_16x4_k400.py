"""MViT-B on Kinetics-400 from random weights (Fan et al. 2021, https://arxiv.org/abs/2104.11227): 16 frames, each 4th.

Run:       torchrun --nnodes 16 --nproc-per-node 8 … tools/train.py configs/mvitv1_b_16x4_k400.py
           torchrun --nproc-per-node 8 tools/train.py configs/mvitv1_b_16x4_k400.py train.accumulate=16
Reference: 78.4 top-1, 93.5 top-5 (original README); 5 clips x 1 crop. 36.6 M parameters, 70.8 GMACs a view.
           The original trains on each video twice in a batch (repeated augmentation), which is not done here, and
           states the rate for 16 clips per step, 1e-4, multiplied by the machines. Here: not yet run.
"""

from vitkit.configs.parts.kinetics import mvit


def config():
    return mvit("mvitv1_b_16x4", num_frames=16, sampling_rate=4)
