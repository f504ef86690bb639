"""D-FINE-seg's smallest semantic network on CamVid, from random weights, for minutes of one core.

Run:  python tools/train.py configs/camvid/dfine_sem.py data.root=DIR    (DIR holds images/ and labels/)
"""

from vitkit.configs.camvid.mask2former import config as mask2former
from vitkit.configs.dfine_sem import config as dfine_sem


def config():
    cfg = mask2former()
    original = dfine_sem("n", "camvid")
    cfg["model"], cfg["criterion"] = original["model"], original["criterion"]
    cfg["model"]["backbone"]["pretrained"] = False
    cfg["optimizer"].update(lr=1e-3, weight_decay=1e-4)
    cfg["schedule"]["warmup_steps"] = 100
    cfg["train"].update(epochs=4, eval_every=4, log_every=46)
    return cfg
