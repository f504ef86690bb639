"""A small Conditional DETR on the synthetic world: no download, minutes on a CPU.

quickstart/detr.py with this head, whose layers are post-norm.

Run:  python tools/train.py configs/examples/conditional_detr/quickstart.py
Here: the loss falls from 16.2 to 9.1 in 200 steps, 2 min on 2 shared cores; not yet run to its end.
"""

from vitkit.configs.examples.conditional_detr.r50 import config as conditional_detr
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    original = conditional_detr()
    cfg["imports"], cfg["criterion"] = original["imports"], original["criterion"]
    cfg["model"].update(type="DeformableDETR", num_queries=20)
    cfg["model"]["head"]["type"] = "ConditionalDETRHead"
    del cfg["model"]["head"]["norm_first"]
    return cfg
