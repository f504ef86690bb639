"""Heads compile into one graph, which then serves images of every size."""

import copy

import pytest
import torch
from helpers.backbones_and_heads import BACKBONES, HEADS
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from vitkit import load_config
from vitkit.engine.build import build_model
from vitkit.nn.queries import run_with_training_queries
from vitkit.registry import HEADS as HEAD_REGISTRY
from vitkit.structures import FeatureInfo, UncompiledTargets
from vitkit.training_queries.build import build_training_queries

SIZES = [(69, 91), (101, 67), (64, 128)]
MULTIPLES_OF_32 = [(64, 96), (96, 64), (64, 128)]


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
    # torch 2.6 recompiles, though not for each size, if finer maps are cropped to another fraction of the padded size.
    is_exact = torch.__version__ >= (2, 7) or name != "deformable_detr"
    for height, width in SIZES if is_exact else MULTIPLES_OF_32:
        padding_mask = torch.zeros(2, height, width, dtype=torch.bool)
        padding_mask[1, height - 9 :] = True
        outputs = compiled(torch.rand(2, 3, height, width), padding_mask)
    assert outputs["pred_logits"].isfinite().all()
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "config",
    [
        "rf_detr_n_coco",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("rf_detr_seg_n_coco", "rtdetr_r18", "dfine_n_coco")),
    ],
)
def test_a_real_time_detector_is_one_graph_for_free_sizes(config):
    spec = load_config(config)["model"] | dict(num_queries=5, num_detections=5, num_classes=3, training_queries=[])
    spec["head"]["num_decoder_layers"] = 1
    spec["backbone"]["pretrained"] = False
    if spec["backbone"]["type"] == "WindowedViT":
        spec["backbone"].update(d_model=32, num_heads=2, depth=2, out_features=["block1", "block2"], global_blocks=[1])
        spec["neck"]["num_blocks"] = 1
    model = build_model(spec).eval()
    torch._dynamo.reset()
    # "aot_eager" prepares the graph as for real compilers, which make numbers that depend on sizes into tensors.
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    # Windows that divide the map in one direction or in both would have graphs of their own.
    for height, width in ((101, 67), (69, 130)):
        images, padding_mask = torch.rand(2, 3, height, width), torch.zeros(2, height, width, dtype=torch.bool)
        padding_mask[1, height - 9 :] = True
        with torch.no_grad():
            expected, got = (run(images, padding_mask)["pred_logits"] for run in (model, compiled))
        torch.testing.assert_close(got.sort(1)[0], expected.sort(1)[0], rtol=1e-3, atol=1e-4)


def targets_of(*counts):
    targets = [dict(labels=torch.zeros(n, dtype=torch.int64), boxes_cxcywh=torch.rand(n, 4)) for n in counts]
    return UncompiledTargets(targets)


class TrainedHead(nn.Module):
    """A head with denoising."""

    def __init__(self, head):
        super().__init__()
        self.head = head
        self.training_queries = build_training_queries([dict(type="BoxDenoising", num_queries=6)], head, num_classes=3)

    def forward(self, maps, padding_mask, targets):
        return run_with_training_queries(self.head, self.training_queries.values(), maps, padding_mask, targets)


def test_other_numbers_of_targets_cause_no_recompilation():
    # The number of denoising queries depends on the targets, so they are made and separated outside of the graph.
    spec = dict(HEADS["deformable_detr"]["head"], num_decoder_layers=1)
    sizes = dict(feature_info={"p4": FeatureInfo(channels=32, stride=16)}, num_classes=3, num_queries=5)
    head = TrainedHead(HEAD_REGISTRY.build(spec, **sizes)).train()
    maps, padding_mask = {"p4": torch.rand(2, 32, 6, 8)}, torch.zeros(2, 6, 8, dtype=torch.bool)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(head, dynamic=True, backend=counter)
    num_graphs = []
    for counts in ((2, 1), (3, 1), (1, 4), (7, 3), (0, 0), (2, 2)):
        outputs = compiled(maps, padding_mask, targets=targets_of(*counts))
        assert outputs["pred_logits"].isfinite().all()
        noised = outputs["training_outputs"][-1]
        copied = [min(n, 6) for n in counts]  # of more, a sample
        num_groups = max(6 // max(*counts, 1), 1)
        assert [len(rows) for rows, _ in noised["matches"]] == [n * num_groups for n in copied]
        num_graphs.append(counter.frame_count)
    # A batch without any target has no mask, and separate graphs.
    assert num_graphs[:4] == [num_graphs[0]] * 4 and num_graphs[4] == num_graphs[5]
    assert num_graphs[0] == 2 and num_graphs[5] <= 4
