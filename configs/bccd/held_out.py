"""dino.py with photos of the training part held out, which are not used for any choice: the score to report.

The published validation photos are interspersed among the training photos, and they choose the best epoch. The names do
not tell the slide; so the test set is the last numbers of the training part, from 00340 on, rather than single photos.

Run:  python tools/train.py configs/bccd/held_out.py data.root=DIR    (DIR holds images/ and annotations/)
      python tools/test.py runs/held_out --split test
Here: not yet run.
"""

from vitkit.configs.bccd.dino import config as dino

TRAINED = ["BloodImage_00[0-2]*", "BloodImage_003[0-3]*"]
HELD_OUT = ["BloodImage_003[4-9]*", "BloodImage_004*"]


def config():
    cfg = dino()
    data = cfg["data"]
    data["train"]["names"] = TRAINED
    data["test"] = {**data["val"], "annotations": data["train"]["annotations"], "names": HELD_OUT}
    return cfg
