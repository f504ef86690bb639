"""MM-Grounding-DINO's box and token predictions beside mmdet's head (https://github.com/open-mmlab/mmdetection, 3.3.0).

Of the package, which needs the compiled mmcv, only the files of the head and of the inverse sigmoid run (`pip install
--no-deps mmdet==3.3.0`). Empty classes take the place of what else they import.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from vitkit.config import load_config
from vitkit.heads.grounding_dino import GroundingDINOHead
from vitkit.nn.queries import Queries
from vitkit.structures import FeatureInfo

pytestmark = pytest.mark.peers
HEAD, LAYERS = "models/dense_heads/grounding_dino_head.py", "models/layers/transformer/utils.py"


class Standing(ModuleType):
    """A module in which every name is a class that can be derived from, and registers what it decorates."""

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        registers = staticmethod(lambda *_, **__: lambda registered: registered)
        return type(name, (nn.Module,), {"register_module": registers})


def load(root, file, name):
    spec = importlib.util.spec_from_file_location(name, root / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def peer(monkeypatch):
    """Return mmdet's module of the head."""
    found = importlib.util.find_spec("mmdet")
    if found is None:
        pytest.skip("pip install --no-deps mmdet==3.3.0")
    root = Path(found.origin).parent
    names = ["cnn", "cnn.bricks", "cnn.bricks.drop"]
    names = ["mmcv", *(f"mmcv.{name}" for name in names), *(f"mmengine.{n}" for n in ("model", "utils", "structures"))]
    names += [f"mmdet.{name}" for name in ("registry", "structures", "structures.bbox", "utils", "models.losses")]
    heads = "mmdet.models.dense_heads"
    names += ["mmengine", "mmdet", "mmdet.models", heads, f"{heads}.atss_vlfusion_head", f"{heads}.dino_head"]
    names += ["mmdet.models.layers"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, Standing(name))
    utils = load(root, LAYERS, "mmdet.models.layers.transformer.utils")
    sys.modules["mmdet.models.layers"].inverse_sigmoid = utils.inverse_sigmoid
    return load(root, HEAD, f"{heads}.grounding_dino_head")


class Passing(nn.Module):
    """A decoder layer that changes the queries a little."""

    def forward(self, x, *_, **__):
        return x + 0.1 * x.flip(-1)


def test_boxes_and_tokens_are_predicted_as_by_mmdets_head(peer):
    torch.manual_seed(0)
    head = load_config("mm_grounding_dino_swin_tiny")["model"]["head"]
    settings = {name: head[name] for name in ("scale", "bias", "share_heads", "box_eps")}
    info = {"p3": FeatureInfo(32, 8), "p4": FeatureInfo(32, 16)}
    sizes = dict(d_model=32, num_heads=4, num_points=2, d_ffn=32, num_encoder_layers=1, num_decoder_layers=3)
    ours = GroundingDINOHead(info, num_queries=40, **sizes, **settings)
    ours.decoder.layers = nn.ModuleList(Passing() for _ in range(3))
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    words, padding = torch.randn(2, 7, 32), torch.arange(7) >= torch.tensor([[7], [5]])
    references = torch.rand(2, 40, 4)
    references[:, :10] = torch.tensor([0.0, 1.0, 5e-4, 1 - 5e-4])  # beyond what the decoder clamps to
    references[:, 10:12] = torch.tensor([2e-6, 1 - 2e-6, 1e-4, 0.5])
    levels = SimpleNamespace(valid_ratios=torch.ones(2, 2, 2), shapes=None, padding_mask=None)
    decoded = ours.decoder(Queries(torch.randn(2, 40, 32), references=references), words, levels)

    theirs = peer.GroundingDINOHead.__new__(peer.GroundingDINOHead)
    nn.Module.__init__(theirs)
    classes = [peer.ContrastiveEmbed(max_text_len=7, log_scale="auto", bias=True) for _ in decoded]
    theirs.cls_branches, theirs.reg_branches = nn.ModuleList(classes), ours.decoder.bbox_embed
    for branch, own in zip(classes, ours.class_embed, strict=True):
        branch.bias.data = own.bias.data[None]
    states = torch.stack([state for state, _, _ in decoded])
    logits, boxes = theirs(states, [reference for _, reference, _ in decoded], words, ~padding)
    for index, (state, _, predicted) in enumerate(decoded):
        torch.testing.assert_close(predicted, boxes[index], rtol=0, atol=1e-6)
        found = ours.class_embed[index](state, words, padding)
        torch.testing.assert_close(found, logits[index], rtol=1e-5, atol=1e-5)
    assert len({tuple(box) for box in boxes[0, 0, :12].tolist()}) > 2
