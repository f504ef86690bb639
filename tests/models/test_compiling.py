"""Heads compile into one graph, which then serves images of every size."""

import copy

import pytest
import torch
from models.test_every_backbone_under_every_head import BACKBONES, HEADS
from torch._dynamo.testing import CompileCounterWithBackend

from vitkit.models import build_model

SIZES = [(69, 91), (101, 67), (64, 128)]


@pytest.mark.parametrize(
    "name", [name if name == "maskformer" else pytest.param(name, marks=pytest.mark.slow) for name in HEADS]
)
def test_a_model_is_one_graph_that_is_compiled_once_for_all_sizes(name):
    spec = copy.deepcopy(HEADS[name])
    spec["head"]["num_decoder_layers"] = 1
    model = build_model(dict(spec, backbone=BACKBONES["timm"], num_queries=5, num_classes=3)).train()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for height, width in SIZES:
        padding_mask = torch.zeros(2, height, width, dtype=torch.bool)
        padding_mask[1, height - 9 :] = True
        outputs = compiled(torch.rand(2, 3, height, width), padding_mask)
    assert outputs["pred_logits"].isfinite().all()
    assert counter.frame_count == 1
