"""Names of MAE's weights: the original's and the transformers library's, both ways, with and without the decoder."""

import json

import pytest
import torch
from golden.weights import load_case
from helpers.weights import assert_same_weights

import vitkit
from vitkit import build_model
from vitkit.model_zoo.converters import convert_official, write_names
from vitkit.models.mae import MAE
from vitkit.registry import BACKBONES
from vitkit.weights import load_weights

VIT = dict(type="ViT", patch_size=8, d_model=32, depth=2, num_heads=4, image_size=48)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MAE({**VIT, "positions": "sincos"}, decoder_d_model=16, decoder_depth=2, decoder_num_heads=2)


def assert_read_back(model, state, form):
    converted, found = convert_official(state, model)
    assert found.name == form and converted.keys() == model.state_dict().keys()
    assert all(torch.equal(converted[key], value) for key, value in model.state_dict().items())


def test_the_original_names_have_no_prefix(model):
    written = write_names(model, "official")
    assert written.format == "facebookresearch/mae"
    encoder = set(model.backbone.state_dict())
    decoder = {key for key in model.state_dict() if not key.startswith("backbone.")}
    assert written.state.keys() == encoder | decoder
    assert {"pos_embed", "blocks.0.attn.qkv.weight", "mask_token", "decoder_blocks.1.mlp.fc2.bias"} <= encoder | decoder
    assert_read_back(model, {"model": written.state}, "facebookresearch/mae")


def test_the_library_has_names_of_its_own(model):
    written = write_names(model, "transformers")
    assert written.format == "transformers ViTMAE"
    for prefix in ("vit.encoder.layer.1.", "decoder.decoder_layers.1."):
        assert f"{prefix}attention.attention.query.weight" in written.state
        assert f"{prefix}output.dense.bias" in written.state
    assert {"vit.embeddings.position_embeddings", "vit.layernorm.weight", "decoder.decoder_pos_embed"} <= set(
        written.state
    )
    assert len(written.state) == len(load_case("vit_mae").state_dict)  # which has the library's names in memory
    assert_read_back(model, written.state, "transformers ViTMAE")
    saved = {key.replace("decoder_layers.", "decoder_encoder.layer."): v for key, v in written.state.items()}
    assert_read_back(model, saved, "transformers ViTMAE")


@pytest.mark.parametrize("target", ["official", "transformers"])
def test_other_models_take_only_the_encoder(model, target):
    state = write_names(model, target).state
    backbone = BACKBONES.build(VIT)
    assert load_weights(backbone, state).missing == []
    assert_same_weights(model.backbone, backbone)
    classifier = build_model(
        dict(type="Classifier", num_classes=3, backbone={**VIT, "classifier": dict(pooling="mean_norm")})
    )
    report = load_weights(classifier.backbone, state, strict=False)
    assert report.missing == ["fc_norm.weight", "fc_norm.bias", "head.weight", "head.bias"]
    assert report.unexpected == ["norm.weight", "norm.bias"]


def test_a_decoder_of_another_grid_has_its_own_positions(model):
    other = MAE(
        {**VIT, "positions": "sincos", "image_size": (16, 32)}, decoder_d_model=16, decoder_depth=2, decoder_num_heads=2
    )
    expected = other.decoder_pos_embed.clone()
    load_weights(other, write_names(model, "official").state)
    assert torch.equal(other.decoder_pos_embed, expected)
    assert torch.equal(other.mask_token, model.mask_token)


def test_a_folder_of_the_library_is_written_and_read(model, tmp_path):
    spec = dict(
        type="MAE", decoder_d_model=16, decoder_depth=2, decoder_num_heads=2, norm_pix=False, mask_ratio=0.5,
        backbone={**VIT, "positions": "sincos"},
    )  # fmt: skip
    torch.save({"model": model.state_dict()}, tmp_path / "mae.pth")
    result = vitkit.convert(dict(model=spec), tmp_path / "folder", to="transformers", weights=tmp_path / "mae.pth")
    assert result.names == "transformers ViTMAE"
    settings = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert settings["architectures"] == ["ViTMAEForPreTraining"] and "id2label" not in settings
    assert settings["decoder_intermediate_size"] == 64 and settings["norm_pix_loss"] is False
    assert "pipeline_tag: image-feature-extraction" in (tmp_path / "folder" / "README.md").read_text()
    read = vitkit.load(tmp_path / "folder").model
    assert (read.mask_ratio, read.norm_pix, read.backbone.pos_embed.requires_grad) == (0.5, False, False)
    assert_same_weights(model, read)
