"""DINOv2 and DINOv3 of the transformers library as backbones whose attention is drawn."""

import json

import numpy as np
import pytest
import torch

import vitkit
from vitkit.apps.explanations.backbone_models import dino_spec, is_backbone, load_backbone
from vitkit.apps.explanations.backbones import backbone_attention
from vitkit.errors import CheckpointError, ConfigError
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.registry import BACKBONES

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14)
V3 = dict(intermediate_size=64, num_register_tokens=4)
KINDS = {
    "dinov2": ("Dinov2", {}),
    "dinov2 registers": ("Dinov2WithRegisters", dict(num_register_tokens=4)),
    "dinov2 gated": ("Dinov2", dict(use_swiglu_ffn=True)),
    "dinov3": ("DINOv3ViT", V3),
    "dinov3 gated": ("DINOv3ViT", dict(**V3, use_gated_mlp=True, hidden_act="silu")),
}
CONFIG = dict(model_type="dinov3_vit", layer_norm_eps=1e-5, **SIZES, **V3)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_equals_that_of_the_transformers_library(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    name, settings = KINDS[kind]
    if not hasattr(transformers, f"{name}Model"):
        pytest.skip(f"this version of transformers has no {name}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **settings, attn_implementation="eager")
    theirs = getattr(transformers, f"{name}Model")(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)

    predictor = load_backbone(tmp_path)
    predictor.transforms = None  # the size that the positions are made for
    image = np.random.default_rng(0).integers(0, 255, (56, 56, 3), dtype=np.uint8)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    pixels = (torch.from_numpy(image).permute(2, 0, 1)[None] / 255 - mean) / std
    with torch.no_grad():
        expected = theirs(pixels, output_attentions=True).attentions
    layers = backbone_attention(predictor, image)
    assert len(layers) == len(expected) == 2
    for layer, weights in zip(layers, expected):
        assert layer.num_tokens == 1 + settings.get("num_register_tokens", 0)
        assert torch.allclose(layer.weights[0], weights[0], atol=1e-5)


def folder_with(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return tmp_path


def test_settings_that_the_vit_does_not_have_are_errors(tmp_path):
    assert dino_spec(folder_with(tmp_path))["mlp_ratio"] == 2
    with pytest.raises(ConfigError, match="hidden_act is 'relu'; vitkit's ViT has 'gelu'"):
        dino_spec(folder_with(tmp_path, hidden_act="relu"))
    values = {name: value for name, value in CONFIG.items() if name != "patch_size"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="has no patch_size"):
        dino_spec(tmp_path)


def test_only_names_of_backbones_and_folders_of_dino_are_backbones(tmp_path):
    assert is_backbone("vit_small_patch8_dino") and is_backbone("timm/convnext_tiny")
    assert is_backbone(folder_with(tmp_path)) and is_backbone(str(tmp_path))
    assert not is_backbone(folder_with(tmp_path, model_type="detr"))
    assert not is_backbone("detr_r50") and not is_backbone("runs/none")


@pytest.mark.parametrize(
    ("name", "frames"),
    [
        ("mvitv2_s_16x4", 16),
        ("timesformer_divided", 8),
        ("i3d_nln_r50", 8),
        ("nonlocal_c2d_r50_5block", 32),
        ("vit_small_patch16", None),
    ],
)
def test_frames_of_backbones_of_clips(name, frames):
    with torch.device("meta"):
        assert with_defaults(BACKBONES.build(name), Backbone).num_frames == frames


def test_backbone_of_clips_refuses_an_image():
    options = ["pretrained=false", "d_model=32", "depth=1", "num_heads=2"]
    with pytest.raises(ConfigError, match="the model classifies clips, so an image has no meaning for it"):
        vitkit.explain("timesformer_divided", image=np.zeros((32, 32, 3), np.uint8), overrides=options)
