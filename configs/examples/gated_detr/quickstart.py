"""quickstart/detr.py with gated cross-attention: no download, minutes on a CPU.

The layer's weights have the published layer's names, so that training may also start from DETR's (--init-partial).

Run:  python tools/train.py configs/examples/gated_detr/quickstart.py
Here: not yet run to its end.
"""

from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["imports"] = ["vitkit.configs.examples.gated_detr.head"]
    cfg["model"]["head"]["type"] = "GatedDETRHead"
    return cfg
