"""mask2former.py with a recording held out of the training part, which chooses nothing: the score to report.

The published validation frames lie 31 to 135 frames, a second or more, from frames that are trained on, and they choose
the best epoch. The recording 0006R0, 101 frames by day, is the test.

Run:  python tools/train.py configs/camvid/held_out.py data.root=DIR    (DIR holds images/ and labels/)
      python tools/test.py runs/held_out --split test
Here: not yet run.
"""

from vitkit.configs.camvid.mask2former import config as mask2former

TRAINED = ["0001TP_*", "0016E5_*"]
HELD_OUT = ["0006R0_*"]


def config():
    cfg = mask2former()
    data = cfg["data"]
    data["train"]["names"] = TRAINED
    data["test"] = {
        **data["val"],
        "images": data["train"]["images"],
        "labels": data["train"]["labels"],
        "names": HELD_OUT,
    }
    return cfg
