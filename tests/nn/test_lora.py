"""LoRA adds the products of its pairs to frozen layers, of whatever kind, and trains nothing else but the heads."""

import copy
from collections import OrderedDict

import pytest
import torch
from helpers.transformers_models import build_theirs
from helpers.vit_models import SMALL, images, randomize
from torch import nn

from vitkit import load
from vitkit.errors import ConfigError
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.nn.attention import MultiHeadAttention
from vitkit.nn.lora import LoRA, LoRAConv2d, LoRALinear
from vitkit.nn.transformer import FeedForward
from vitkit.registry import BACKBONES, MODELS
from vitkit.seq2seq.incremental import CachedAttention
from vitkit.weights.lora import merge_pairs

VIT = dict(type="ViT", pretrained=False, **SMALL)


def classifier():
    return randomize(MODELS.build(dict(type="Classifier", backbone=VIT), num_classes=3))


def randomize_pairs(model):
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".lora." in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def merged_copy(base, model, scale):
    """Return the base with the products of a model's pairs added to its weights, row by row."""
    base = copy.deepcopy(base)
    with torch.no_grad():
        for name, layer in base.named_modules():
            for part, pair in getattr(model.get_submodule(name), "lora", {}).items():
                rows = len(layer.weight) // 3
                start = 0 if part == "whole" else "qkv".index(part) * rows
                for i in range(pair.b.shape[0]):
                    row = sum(pair.b[i, r] * pair.a[r] for r in range(pair.a.shape[0]))
                    layer.weight[start + i] += scale * row.view_as(layer.weight[0])
    return base


@pytest.mark.parametrize("parts", ["qkv", "qv", "k"])
def test_outputs_are_those_of_the_base_at_first_and_then_of_the_merged_weights(parts):
    model = classifier()
    base = copy.deepcopy(model)
    names = LoRA(layers="backbone.*qkv|proj|fc1", rank=2, alpha=3.0, parts=parts).add_to(model)
    assert len(names) == 3 * 3 + 1 and set(model.backbone.blocks[0].attn.qkv.lora) == set(parts)
    x = images(32, 32)
    assert model(x)["logits"].equal(base(x)["logits"])
    randomize_pairs(model)
    outputs = model(x)["logits"]
    assert not outputs.allclose(base(x)["logits"], rtol=0.1)
    torch.testing.assert_close(outputs, merged_copy(base, model, 1.5)(x)["logits"], rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_the_paper():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(5, 4))
    LoRA(layers="*", rank=2, alpha=6.0, train="*").add_to(layer)
    randomize_pairs(layer)
    x, grad = torch.randn(7, 5), torch.randn(7, 4)
    layer(x).backward(grad)
    pair = layer[0].lora["whole"]
    torch.testing.assert_close(pair.b.grad, 3 * grad.T @ x @ pair.a.T)
    torch.testing.assert_close(pair.a.grad, 3 * pair.b.T @ grad.T @ x)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["0.lora.whole.a", "0.lora.whole.b"]


@pytest.mark.parametrize(
    ("backbone", "layers"),
    [
        (
            dict(
                type="Swin",
                embed_dim=8,
                depths=[1, 1, 1, 1],
                num_heads=[1, 1, 1, 1],
                window=4,
                drop_path=0.0,
                pretrained=False,
            ),
            "*qkv",
        ),
        (dict(type="ResNet", depth=18, base_channels=4, pretrained=False), "*conv?|*downsample.0"),
        (dict(type="ViT", pretrained=False, **SMALL, blocks=dict(qkv_bias="qv")), "*qkv"),
    ],
    ids=["swin", "resnet", "beit"],
)
def test_layers_whose_owner_multiplies_by_their_weights_are_updated_too(backbone, layers):
    torch.manual_seed(0)
    model = BACKBONES.build(backbone).train()
    base = copy.deepcopy(model)
    LoRA(layers=layers, rank=2).add_to(model)
    randomize_pairs(model)
    merged = merged_copy(base, model, 1.0)
    assert not any(m.training for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    for ours, theirs in zip(model(images(32, 40)).values(), merged.eval()(images(32, 40)).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    sum(map_.sum() for map_ in model(images(32, 32)).values()).backward()
    updated = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert updated and all(".lora." in name and grad is not None for name, grad in updated.items())


@pytest.mark.parametrize("attention", [MultiHeadAttention, CachedAttention])
def test_joint_projections_of_attention_are_updated_too(attention):
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(self_attn=attention(8, 2)))
    base, layer = copy.deepcopy(model), model.self_attn
    assert LoRA(layers="self_attn|self_attn.out_proj", rank=2, parts="qv", train="*").add_to(model) == [
        "self_attn", "self_attn.out_proj"
    ]  # fmt: skip
    x = torch.randn(2, 5, 8)
    assert isinstance(layer, attention) and layer(x, x, x).equal(base.self_attn(x, x, x))
    randomize_pairs(model)
    layer(x, x, x).sum().backward()
    names = {f"self_attn.{name}.{matrix}" for name in ("lora.q", "lora.v", "out_proj.lora.whole") for matrix in "ab"}
    assert {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()} == names
    merged = copy.deepcopy(base)
    merged.load_state_dict(merge_pairs(model.state_dict(), {"rank": 2, "alpha": 2.0}, "last.pth"))
    torch.testing.assert_close(layer(x, x, x), merged.self_attn(x, x, x))
    update = layer.lora["v"].b @ layer.lora["v"].a
    torch.testing.assert_close(merged.self_attn.in_proj_weight[16:] - base.self_attn.in_proj_weight[16:], update)
    assert merged.self_attn.in_proj_weight[8:16].equal(base.self_attn.in_proj_weight[8:16])
    assert not layer(x, x, x).allclose(base.self_attn(x, x, x), rtol=0.1)
    torch.testing.assert_close(copy.deepcopy(model).self_attn(x, x, x), layer(x, x, x))


def test_dropout_is_that_of_the_update_alone():
    torch.manual_seed(0)
    for layer, x in ((nn.Linear(6, 3), torch.randn(1, 6)), (nn.Conv2d(6, 3, 3, padding=1), torch.randn(1, 6, 2, 2))):
        model = nn.Sequential(copy.deepcopy(layer))
        LoRA(layers="0", rank=2, dropout=0.5, train="*").add_to(model)
        assert isinstance(model[0], LoRALinear | LoRAConv2d) and model.train()(x).allclose(layer(x))
        randomize_pairs(model)
        assert not model(x).equal(model(x)) and model.eval()(x).equal(model(x))
        mean = model.train()(x.repeat(8000, *[1] * (x.ndim - 1))).mean(dim=0, keepdim=True)
        torch.testing.assert_close(mean, model.eval()(x), rtol=0.1, atol=0.1)


def test_trained_are_the_pairs_the_heads_and_what_is_named():
    model = classifier()
    lora = LoRA(layers="backbone.*qkv", rank=2, parts="qv")
    trained = lora.list_trained_names(model)
    lora.add_to(model)
    assert trained == {"backbone.head.weight", "backbone.head.bias"}
    pairs = {f"backbone.blocks.{i}.attn.qkv.lora.{part}.{m}" for i in range(3) for part in "qv" for m in "ab"}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained | pairs
    parts = {
        name.split(".")[1] for name in LoRA(layers="*", train="backbone.norm|head").list_trained_names(classifier())
    }
    assert parts == {"norm", "head"}


def test_vit_b_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = BACKBONES.build(dict(type="vit_base_patch16", pretrained=False))
    assert len(LoRA(layers="*qkv", rank=4, parts="qv", train="norm.*").add_to(model)) == 12
    pairs = sum(p.numel() for name, p in model.named_parameters() if ".lora." in name)
    assert pairs == 12 * 2 * 4 * (768 + 768) == 147_456


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("value_proj", r"fits 'value_proj'\. Did you mean '\*\.value_proj'"),
        ("layers.(value_proj|other)", "has parentheses, which patterns lack"),
    ],
)
def test_patterns_that_fit_nothing_as_they_are_written_name_one_that_does(layers, message):
    model = nn.ModuleDict({"layers": nn.ModuleDict({"value_proj": nn.Linear(4, 4)})})
    with pytest.raises(ConfigError, match=message):
        LoRA(layers=layers, rank=1).add_to(model)


def test_patterns_that_match_nothing_are_errors_with_the_nearest_names():
    for layers in ("backbone.*qkw", "backbone.*proj|qkw"):
        with pytest.raises(ConfigError, match=r"train\.lora\.layers=.*fits 'backbone\.\*qkw'\. Did you mean 'qkv'\?"):
            LoRA(layers=layers).add_to(classifier())
    with pytest.raises(ConfigError, match=r"an alternative is empty"):  # not all layers of the backbone
        LoRA(layers="backbone.*qkv|").add_to(classifier())
    with pytest.raises(ConfigError, match=r"no parameter or part whose name fits 'heads'\. Did you mean 'head'\?"):
        LoRA(layers="*qkv", train="heads").add_to(classifier())
    with pytest.raises(ConfigError, match=r"Known: linear1, linear2\."):
        LoRA(layers="*norm").add_to(FeedForward(4, 8))
    model = classifier()
    model.freeze_backbone = True
    with pytest.raises(ConfigError, match="model.freeze_backbone=True computes the backbone without gradients"):
        LoRA(layers="*qkv").add_to(model)


def test_options_that_do_not_fit_the_layers_are_named(caplog):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    with pytest.raises(ConfigError, match=r"train.lora.rank: got 7; '0' has only 4 inputs and 6 outputs"):
        LoRA(layers="*", rank=7).add_to(model)
    assert all(p.requires_grad for p in model.parameters())
    assert LoRA(layers="*", rank=6, train="1").add_to(model) == ["0", "1"]
    assert "layers='*' and train='1' both name 1 layer, such as '1': only their updates are trained" in caplog.text
    assert not model[1].frozen_weight.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(), "layers: not set"),
        (dict(layers="*", rank=0), "rank: got 0; expected at least 1"),
        (dict(layers="*", alpha=0.0), "alpha: got 0.0"),
        (dict(layers="*", dropout=1.0), "dropout: got 1.0"),
        (dict(layers="*", parts="qx"), "parts: got 'qx'"),
    ],
)
def test_options_out_of_range_are_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        LoRA(**options)


def test_activation_checkpointing_keeps_the_gradients():
    grads = []
    for recompute in (False, True):
        model = classifier().train()
        LoRA(layers="*qkv|fc2", rank=2).add_to(model)
        randomize_pairs(model)
        if recompute:
            assert enable_activation_checkpointing(model) == 3
        model(images(32, 32))["logits"].square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-6)


def test_outputs_and_gradients_equal_those_of_peft(tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    theirs = build_theirs(transformers, "vit")
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path).model
    LoRA(layers="backbone.*qkv|fc1", rank=2, alpha=5.0, parts="qv").add_to(ours)
    config = peft.LoraConfig(r=2, lora_alpha=5, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "fc1"])
    peft.inject_adapter_in_model(config, theirs)
    layers = {
        "attn.qkv.lora.q": "attention.q_proj",
        "attn.qkv.lora.v": "attention.v_proj",
        "mlp.fc1.lora.whole": "mlp.fc1",
    }
    pairs = {
        f"backbone.blocks.{i}.{name}.{matrix.lower()}": f"vit.layers.{i}.{other}.lora_{matrix}.default.weight"
        for i in range(2)
        for name, other in layers.items()
        for matrix in "AB"
    }
    randomize_pairs(ours)
    with torch.no_grad():
        for name, other in pairs.items():
            theirs.get_parameter(other).copy_(ours.get_parameter(name))
    x = torch.randn(2, 3, 32, 32)
    expected, outputs = theirs(x).logits, ours.backbone(x)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(outputs)
    expected.backward(grad)
    outputs.backward(grad)
    for name, other in pairs.items():
        torch.testing.assert_close(
            ours.get_parameter(name).grad, theirs.get_parameter(other).grad, rtol=1e-3, atol=1e-4
        )
