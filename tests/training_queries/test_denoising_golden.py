"""Denoising queries of the published configs with the originals' noise, labels, boxes and masks."""

import pytest
import torch
from golden.weights import load_case

from vitkit.configs.deim import config as deim
from vitkit.configs.dfine import config as dfine
from vitkit.configs.rtdetr import config as rtdetr
from vitkit.configs.rtdetrv2 import config as rtdetrv2
from vitkit.heads.dfine import DFINEHead
from vitkit.nn.queries import attention_mask, part_sizes
from vitkit.structures import FeatureInfo
from vitkit.training_queries.box_denoising import Noise, list_copied_rows
from vitkit.training_queries.build import build_training_queries

CONFIGS = {"dfine": dfine, "deim": deim, "rtdetr": rtdetr, "rtdetrv2": rtdetrv2}
CASE = load_case("box_denoising", weights=False)
SETTINGS = CASE.meta["settings"]


@pytest.mark.parametrize("variant", CASE.targets)
@pytest.mark.parametrize("name", CONFIGS)
def test_denoising_queries_equal_the_originals(monkeypatch, name, variant):
    config = CONFIGS[name]()
    (spec,) = config["model"]["training_queries"]
    assert spec["label_noise"] == SETTINGS["label_noise_ratio"] and spec["box_noise"] == SETTINGS["box_noise_scale"]
    features = {"res5": FeatureInfo(8, 32)}
    small = dict(num_queries=SETTINGS["num_queries"], d_model=8, num_heads=2, num_points=[1], d_ffn=8)
    head = DFINEHead(features, SETTINGS["num_classes"], num_decoder_layers=1, **small)
    built = build_training_queries([spec | dict(num_queries=SETTINGS["num_denoising"])], head, SETTINGS["num_classes"])
    denoising = built.denoising

    inputs, meta = CASE.torch_inputs(), CASE.meta["denoising"][variant]
    targets = [
        dict(labels=torch.tensor(target["labels"]), boxes_cxcywh=torch.tensor(target["boxes"]))
        for target in CASE.targets[variant]
    ]
    counts = [len(target["labels"]) for target in targets]
    rows = tuple(list_copied_rows(counts, 2 * meta["groups"]))
    chance, labels, signs, shares = (inputs[f"{variant}/{part}"][rows] for part in ("chance", "new", "sign", "part"))
    noise = chance, labels, signs * 2 - 1, shares
    monkeypatch.setattr(denoising, "draw", lambda count, device: Noise(*(part.to(device) for part in noise)))
    (noised,) = denoising(head, targets, None)

    expected = {key: inputs[f"{variant}/{name}/{key}"] for key in ("labels", "boxes_unact", "attn_mask")}
    known = expected["labels"] < SETTINGS["num_classes"]
    content = denoising.label_embed.weight.cpu()[expected["labels"]] * known[..., None]
    assert torch.equal(noised["queries"].content, content)
    assert noised["repeats"] == meta["groups"]
    boxes = expected["boxes_unact"].sigmoid()
    torch.testing.assert_close(noised["queries"].references, boxes, atol=1e-7, rtol=1e-4)
    mask = attention_mask(part_sizes(noised), [True] * noised["num_parts"], SETTINGS["num_queries"])
    assert torch.equal(mask, expected["attn_mask"])
    for image, (positive, _) in enumerate(noised["matches"]):
        assert positive.tolist() == inputs[f"{variant}/{name}/positive/{image}"].tolist()


def test_the_rules_differ_where_noise_turns_a_size_negative():
    sizes = {name: CASE.torch_inputs()[f"equal/{name}/boxes_unact"].sigmoid()[..., 2:] for name in CONFIGS}
    inverted = sizes["rtdetr"] < 1.1e-5
    assert inverted.any(-1).float().mean() > 0.2
    assert torch.equal(sizes["dfine"] != sizes["rtdetr"], inverted)
    assert (sizes["dfine"][inverted] > 0.01).all()
