"""Objects and regions from a few hundred of your photos with panoptic maps: a small Mask2Former.

Run:  vitkit start IMAGES ANNOTATIONS --task panoptic    (ANNOTATIONS: COCO's panoptic JSON, its maps beside it)
Here: not measured on photos; `quickstart/mask2former_panoptic.py` is the same model on the synthetic world.
"""

from vitkit.configs.start.instance import config as instance


def config(size=320, pretrained=True, channels=None, flips=True):
    """Return the config; for `size` see start/instance.py."""
    cfg = instance(size, pretrained, channels, flips)
    cfg["model"]["tasks"] = ["panoptic"]
    for name in ("train", "val"):
        split = cfg["data"][name]
        transforms = split["transforms"]
        cfg["data"][name] = dict(
            type="CocoPanoptic", images="data/own/images", annotations=f"data/own/{name}.json",
            maps="data/own/panoptic", transforms=transforms,
        )  # fmt: skip
    cfg["evaluator"] = dict(type="PanopticEvaluator")
    cfg["train"]["best_metric"] = "PQ"
    return cfg
