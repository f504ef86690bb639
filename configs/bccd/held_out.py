"""dino.py with photos held out of the training part, which choose nothing: the score to report.

The published validation photos are shuffled among those that are trained on, and they choose the best epoch. No name
tells the slide; the test are the last numbers of the training part, from 00340 on, rather than single photos of it.

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
