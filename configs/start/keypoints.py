"""Keypoints from a few hundred of your photos: a small RF-DETR with keypoints (https://arxiv.org/abs/2511.09554).

Run:  vitkit start IMAGES ANNOTATIONS --task keypoints
Here: not measured on photos; `quickstart/keypoints.py` is such a model on the synthetic world.
"""

from vitkit.configs.start.detection import config as detection


def config(size=224, pretrained=True, channels=None, flips=True):
    """Return the config; for the arguments see start/detection.py."""
    cfg = detection(size, pretrained, channels=channels, flips=flips)
    # The neck takes maps of one stride.
    cfg["model"]["backbone"]["out_features"] = ["res4"] if pretrained else ["res3"]
    cfg["model"] |= dict(
        type="RFDETRKeypoints",
        neck=dict(type="C2fProjectionPair", out_channels=128, num_blocks=1),
        head=dict(
            type="RFDETRHead", d_model=128, num_heads=8, num_cross_heads=8, num_points=4, d_ffn=512,
            num_decoder_layers=2,
        ),
        training_queries=[dict(type="QueryGroups", groups=2)],
    )  # fmt: skip
    points = {f"keypoint_{name}": 1.0 for name in ("l1", "findable", "visible", "nll")}
    cfg["criterion"] = dict(
        type="BoxKeypointCriterion", class_loss="mal", weights=dict(labels=1.0, l1=5.0, giou=2.0, **points),
        matcher=dict(type="HungarianBoxKeypointMatcher", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0),
    )  # fmt: skip
    for split in ("train", "val"):
        cfg["data"][split]["keypoints"] = True
    cfg["evaluator"]["iou_types"] = ["keypoints", "bbox"]
    cfg["train"]["best_metric"] = "keypoints/AP"
    return cfg
