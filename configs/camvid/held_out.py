"""mask2former.py with a recording of the training part held out, which is not used for any choice: the score to report.

The published validation frames are 31 to 135 frames, a second or more, away from training frames, and they choose the
best epoch. The test set is the recording 0006R0, 101 frames by day.

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
