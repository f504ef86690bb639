"""MViTv2-B on Kinetics-400 from random weights (Li et al. 2021, https://arxiv.org/abs/2112.01526): 32 frames, each 3rd.

Run:       torchrun --nnodes 16 --nproc-per-node 8 … tools/train.py configs/mvitv2_b_32x3_k400.py
           torchrun --nproc-per-node 8 tools/train.py configs/mvitv2_b_32x3_k400.py train.accumulate=16
Reference: 82.9 top-1, 95.7 top-5 (original README); 5 clips x 1 crop. 51.2 M parameters, 225.2 GMACs a view.
           The original trains on each video twice in a batch (repeated augmentation), which is not done here, and
           states the rate for 16 clips per step, 1e-4, multiplied by the machines. Here: not yet run.
"""

from vitkit.configs.parts.kinetics import mvit


def config():
    return mvit("mvitv2_b_32x3", num_frames=32, sampling_rate=3)
