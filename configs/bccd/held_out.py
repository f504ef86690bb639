"""small_first.py with photos of the training part held out, which are not used for any choice: the score to report.

The published validation photos are interspersed among the training photos, and they choose the best epoch. The names do
not tell the slide; so the test set is the last numbers of the training part, from 00340 on, rather than single photos.

Run:  python tools/train.py configs/bccd/held_out.py data.root=DIR    (DIR holds images/ and annotations/)
      vitkit test runs/held_out --split test
Here: AP 0.630, AP50 0.944, AP75 0.702 (seed 42) on the 35 test photos; by a bootstrap over them, the 95 % interval is
      0.599 to 0.668. 16 min of one core of an AMD EPYC that has only AVX2, float32, torch 2.14.1. On the 87 validation
      photos AP is 0.572.
"""

from vitkit.configs.bccd.small_first import config as small_first

TRAINED = ["BloodImage_00[0-2]*", "BloodImage_003[0-3]*"]
HELD_OUT = ["BloodImage_003[4-9]*", "BloodImage_004*"]


def config():
    cfg = small_first()
    data = cfg["data"]
    data["train"]["names"] = TRAINED
    data["test"] = {**data["val"], "annotations": data["train"]["annotations"], "names": HELD_OUT}
    return cfg
