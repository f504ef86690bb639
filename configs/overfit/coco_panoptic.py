"""A small Mask2Former overfits the first four images of COCO's training data, things and stuff.

Run:  python tools/train.py configs/overfit/coco_panoptic.py data.root=DIR    (DIR holds train2017/ and annotations/)
Here: PQ 0.904 for seed 42 on four images with 20 segments of the extract https://github.com/lightly-ai/coco128_yolo,
      in under 2 min of one core's processor time.
"""

from vitkit.configs.overfit.coco_instance import config as coco_instance


def config():
    cfg = coco_instance()
    images = dict(
        type="CocoPanoptic", first=4, images="{root}/train2017", maps="{root}/annotations/panoptic_train2017",
        annotations="{root}/annotations/panoptic_train2017.json",
        transforms=dict(type="EvalResize", short_side=240, max_size=320),
    )  # fmt: skip
    cfg["model"]["tasks"] = ["panoptic"]
    cfg["data"].update(train=images, val=images)
    cfg["evaluator"] = dict(type="PanopticEvaluator")
    cfg["train"].update(epochs=120, eval_every=40, best_metric="PQ")
    return cfg
