"""TimeSformer on Kinetics-400 (Bertasius et al. 2021, https://arxiv.org/abs/2102.05095): 15 epochs from the weights of
an image ViT.

Its networks are named after their attention over space and time: within each frame (space), over all tokens (joint),
over time and then space (divided), local and then global (sparse), over time, width and height (axial). They read 8
frames, each 32nd, of 224 x 224. HR and L are the divided one with 16 frames, each 16th, of 448 x 448, and with 96
frames, each 4th.

Run:       torchrun --nproc-per-node 8 tools/train.py timesformer_divided_k400 model.backbone.pretrained=FILE
           with the weights of a ViT-B/16 of ImageNet-21k
Reference: the paper's table 1, and the original README for divided, HR and L; 1 clip x 3 crops. GMACs are of a view,
           those of HR and L of the three crops. The paper gives no code for axial and sparse attention.
Here:      not yet run.
"""

from typing import Literal

from vitkit.configs.parts.kinetics import NUM_CLASSES, PIXELS, crops, kinetics, scale_jitter

VARIANTS = {
    "timesformer_space_k400": (dict(network="space"), "76.9 top-1; 86.1 M parameters, 140.7 GMACs"),
    "timesformer_joint_k400": (dict(network="joint"), "77.4 top-1; 86.1 M parameters, 179.7 GMACs"),
    "timesformer_divided_k400": (
        dict(network="divided"),
        "78.0 top-1 (paper), 77.9 top-1 and 93.2 top-5 (README); 121.6 M parameters, 196.1 GMACs",
    ),
    "timesformer_sparse_k400": (dict(network="sparse"), "75.9 top-1; 121.6 M parameters"),
    "timesformer_axial_k400": (dict(network="axial"), "73.5 top-1; 157.0 M parameters"),
    "timesformer_hr_k400": (dict(network="hr"), "79.6 top-1, 94.0 top-5; 5110 GMACs"),
    "timesformer_l_k400": (dict(network="l"), "80.6 top-1, 94.7 top-5; 7140 GMACs"),
}
"""Name -> arguments of `config`, and what is published."""


def config(network: Literal["space", "joint", "divided", "sparse", "axial", "hr", "l"] = "divided"):
    num_frames, sampling_rate = {"hr": (16, 16), "l": (96, 4)}.get(network, (8, 32))
    size, short_sides = (448, (448, 512)) if network == "hr" else (224, (256, 320))
    return dict(
        model=dict(
            type="Classifier", num_classes=NUM_CLASSES, backbone=dict(type=f"timesformer_{network}"), **PIXELS
        ),
        criterion=dict(type="ClassificationLoss"),
        data=kinetics(
            num_frames=num_frames, sampling_rate=sampling_rate, images_per_gpu=1,
            train_transforms=scale_jitter(size, short_sides),
            val_transforms=crops(3, size, size),
        ),
        optimizer=dict(type="SGD", lr=0.005, momentum=0.9, weight_decay=1e-4),
        schedule=dict(type="MultiStepLR", drop_at_epochs=[11, 14]),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(epochs=15, precision="auto", reference_batch_size=8, best_metric="top1"),
    )  # fmt: skip
