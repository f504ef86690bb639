"""MACs equal those that fvcore counts, by module, for models of each kind."""

import json

import pytest
import torch

from vitkit import BACKBONES, build_model
from vitkit.apps.analysis.fvcore_macs import count_macs_by_fvcore
from vitkit.apps.analysis.macs import count_macs
from vitkit.config import load_config
from vitkit.errors import ConfigError
from vitkit.tools import analyze

BACKBONE_SIZES = {"resnet18": (96, 64), "vit_tiny_patch16": (224, 224), "swin_tiny": (64, 96)}
MODELS = ("quickstart/detr", "quickstart/dino", "quickstart/mask2former_instance")


def build(name):
    if name in BACKBONE_SIZES:
        return BACKBONES.build({"type": name, "num_classes": 10}), BACKBONE_SIZES[name]
    return build_model(load_config(name)["model"]), (96, 128)


@pytest.mark.parametrize("name", [*BACKBONE_SIZES, *MODELS])
def test_macs_equal_those_of_fvcore(name):
    model, size = build(name)
    model.train()
    image = torch.zeros(1, 3, *size)
    expected, got = count_macs_by_fvcore(model, image), count_macs(model, image)
    assert got.total == pytest.approx(expected.total, rel=1e-4) and got.total > 1e6
    children = [name for name, _ in model.named_children()]
    assert {child: got.by_module[child] for child in children} == pytest.approx(
        {child: expected.by_module[child] for child in children}, rel=1e-3, abs=1e5
    )
    assert model.training and not {"aten::conv2d", "aten::matmul", "aten::linear"} & expected.uncounted.keys()


def test_models_that_cannot_be_traced_are_named():
    class Refused(torch.nn.Module):
        def forward(self, images):
            raise RuntimeError("this cannot be understood by the tracer")

    model = Refused()
    with pytest.raises(ConfigError, match="torch.jit cannot trace Refused"):
        count_macs_by_fvcore(model, torch.zeros(1))


def test_analyze_prints_both_counts(capsys):
    analyze.main(["resnet18", "--size", "64x64", "--fvcore", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["macs_by_fvcore"] == pytest.approx(report["parts"][""]["macs"], rel=1e-4)
    analyze.main(["resnet18", "--size", "64x64", "--fvcore"])
    assert f"counted by fvcore: {report['macs_by_fvcore'] / 1e9:.3f} G" in capsys.readouterr().out
