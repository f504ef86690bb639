"""The local relation operator against what the original kernels computed, and against plain formulations."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from vitkit.errors import ConfigError
from vitkit.nn.attention import AttentionRecorder
from vitkit.nn.local_relation import SIMILARITIES, GeometryPrior, LocalRelation, local_relation, window_scores

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))
from weights import compare, load_case

NAMES = [*list(SIMILARITIES)[:6], "none"]
"""The originals' numbers 0 to 5 and -1, which indexes the last."""
VARIANTS = (
    *(f"sim{i}" for i in range(6)), "geometry_only", "stride2", "dilation2", "kernel5", "saliency",
)  # fmt: skip


@pytest.fixture(scope="module")
def case():
    return load_case("local_relation_layer")


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden_outputs_scores_and_gradients(case, variant):
    settings = case.meta["settings"]["variants"][variant]
    names = ("query", "key", "value", "pos_weight", "upstream")
    *inputs, upstream = (torch.from_numpy(case.inputs[f"{variant}/{name}"]) for name in names)
    inputs = [x.requires_grad_() for x in inputs]
    similarity = NAMES[settings["sim_method"]]
    options = dict(stride=settings["stride"], dilation=settings["dilation"], scale=settings["scale"])
    output = local_relation(*inputs, similarity=similarity, **options)
    output.backward(upstream)
    ours = {f"{variant}/out": output.detach().numpy(), f"{variant}/sim": scores(inputs, similarity, options).numpy()}
    for name, x in zip(names, inputs):
        ours[f"{variant}/grad_{name}"] = (torch.zeros_like(x) if x.grad is None else x.grad).numpy()
    report = compare(case, ours)
    assert all(row["ok"] for row in report.values()), report


def scores(inputs, similarity, options):
    """(B * G, k * k, h * w)."""
    query, key, _, prior = (x.detach() for x in inputs)
    saliency = None
    if key.shape[1] > query.shape[1]:
        channels = query.shape[1] // len(prior)
        saliency = key[:, query.shape[1] :].repeat_interleave(len(prior) // (key.shape[1] - query.shape[1]), 1)
        key, saliency = key[:, : query.shape[1]], saliency * channels
    rows = window_scores(query, key, prior, saliency, similarity=similarity, **options)
    return rows.unflatten(3, (query.shape[2], -1))[..., : query.shape[3]].flatten(3).flatten(0, 1)
