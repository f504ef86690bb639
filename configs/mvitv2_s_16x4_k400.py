"""MViTv2-S on Kinetics-400 from random weights (Li et al. 2021, https://arxiv.org/abs/2112.01526): 16 frames, each 4th.

Run:       torchrun --nnodes 16 --nproc-per-node 8 … tools/train.py configs/mvitv2_s_16x4_k400.py
           torchrun --nproc-per-node 8 tools/train.py configs/mvitv2_s_16x4_k400.py train.accumulate=16
Reference: 81.0 top-1, 94.6 top-5 (original README); 5 clips x 1 crop. 34.5 M parameters, 64.5 GMACs a view.
           The original trains on each video twice in a batch (repeated augmentation), which is not done here, and
           states the rate for 16 clips per step, 1e-4, multiplied by the machines. Here: not yet run.
"""

from vitkit.configs.parts.kinetics import mvit


def config():
    return mvit("mvitv2_s_16x4", num_frames=16, sampling_rate=4)
