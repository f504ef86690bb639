"""The example of a head of another paper, Conditional DETR, which vitkit itself does not have."""

import re
from pathlib import Path

import pytest
import torch

from vitkit import HEADS, build_model
from vitkit.config import config_names, load_config
from vitkit.errors import ConfigError
from vitkit.registry import CRITERIA
from vitkit.structures import FeatureInfo

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "examples" / "conditional_detr"
LAYERS = dict(num_heads=2, d_ffn=16, num_encoder_layers=1, num_decoder_layers=3)


@pytest.fixture(scope="module")
def config():
    return load_config(FOLDER / "quickstart.py")  # it registers the head


def build(*training_queries, num_queries=5, **changes):
    torch.manual_seed(0)
    return build_model(
        dict(
            type="DeformableDETR",
            num_queries=num_queries,
            num_classes=3,
            backbone=dict(type="ResNet", depth=18, norm="frozen_bn", pretrained=False),
            neck=dict(type="ChannelProjection", out_channels=32),
            head=dict(type="ConditionalDETRHead", d_model=32, dropout=0.0, **LAYERS),
            training_queries=list(training_queries),
            **changes,
        )
    )


def targets_of(*counts):
    return [
        dict(labels=torch.arange(count) % 3, boxes_cxcywh=torch.rand(count, 4) * 0.4 + 0.3, image_id=i)
        for i, count in enumerate(counts)
    ]


def test_outputs_have_the_promised_shapes_and_ranges(config):
    outputs = build().eval()(torch.randn(2, 3, 70, 97))
    assert outputs["pred_logits"].shape == (2, 5, 3) and outputs["pred_boxes"].shape == (2, 5, 4)
    assert outputs["reference_points"].shape == (2, 5, 2) and len(outputs["aux_outputs"]) == 2
    assert outputs["pred_boxes"].min() >= 0 and outputs["pred_boxes"].max() <= 1
    # The box head starts from zero, so boxes are centered on their points.
    torch.testing.assert_close(outputs["pred_boxes"][..., :2], outputs["reference_points"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("counts", [(2, 1), (0, 0)])
@pytest.mark.parametrize("groups", [1, 3])
def test_every_parameter_gets_a_finite_gradient_also_without_objects(config, counts, groups):
    model = build(*[dict(type="QueryGroups", groups=groups)] * (groups > 1)).train()
    torch.nn.init.normal_(model.head.bbox_embed.layers[-1].weight)
    inputs = (torch.randn(2, 3, 64, 96), None, *[targets_of(*counts)] * (groups > 1))
    losses = CRITERIA.build(config["criterion"])(model(*inputs), targets_of(*counts))
    sum(losses.values()).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_isolated_images_do_not_depend_on_padding(config):
    model = build(isolate_padding=True).eval()
    torch.nn.init.normal_(model.head.bbox_embed.layers[-1].weight)
    images, mask = torch.zeros(1, 3, 160, 192), torch.ones(1, 160, 192, dtype=torch.bool)
    images[..., :70, :97], mask[:, :70, :97] = torch.randn(3, 70, 97), False
    with torch.no_grad():
        alone, padded = model(images[..., :70, :97], mask[:, :70, :97]), model(images, mask)
    for name in ("pred_logits", "pred_boxes"):
        torch.testing.assert_close(padded[name], alone[name], atol=1e-5, rtol=1e-4)


def test_added_queries_leave_the_heads_own_outputs_as_they_are(config):
    grouped, plain = build(dict(type="QueryGroups", groups=3)).train(), build().train()
    plain.load_state_dict({k: v for k, v in grouped.state_dict().items() if not k.startswith("training_queries.")})
    images = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        outputs, expected = grouped(images, None, targets_of(2, 1)), plain(images)
    assert len(outputs["training_outputs"]) == 2
    torch.testing.assert_close(outputs["pred_logits"], expected["pred_logits"], atol=1e-5, rtol=1e-4)


def test_denoising_is_refused_as_queries_start_from_points(config):
    message = "BoxDenoising needs queries that start from boxes, unlike those of this ConditionalDETRHead. Choose"
    with pytest.raises(ConfigError, match=message):
        build(dict(type="BoxDenoising"))


def test_the_file_and_its_module_may_both_be_imported(config):
    assert load_config(FOLDER / "quickstart.py", [f"imports=[{FOLDER / 'head.py'}]"])["imports"]


def test_typos_name_the_nearest_key():
    with pytest.raises(ConfigError, match=r"model\.head\.num_head\b.*Did you mean 'num_heads'"):
        load_config(FOLDER / "r50.py", ["model.head.num_head=4"])
    with pytest.raises(ConfigError, match=r"(?s)unknown head 'ConditionalDETRHed'.*Did you mean 'ConditionalDETRHead'"):
        load_config(FOLDER / "r50.py", ["model.head=ConditionalDETRHed"])


@pytest.mark.parametrize("changes", [dict(num_queries=0), dict(num_heads=3), dict(d_model=16)])
def test_wrong_arguments_are_named(config, changes):
    (name,) = changes
    arguments = dict(num_queries=5, d_model=32, **LAYERS) | changes
    with pytest.raises(ConfigError, match=f"^head: .*{name}={changes[name]}"):
        HEADS.build("ConditionalDETRHead", feature_info={"res5": FeatureInfo(32, 32)}, num_classes=3, **arguments)


def test_the_published_config_builds_with_the_published_size():
    model = build_model(load_config(FOLDER / "r50.py")["model"] | dict(num_classes=91))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(44, abs=1)


def test_only_its_configs_are_listed_as_configs():
    names = [name for name in config_names() if name.startswith("examples/conditional_detr/")]
    assert names == ["examples/conditional_detr/quickstart", "examples/conditional_detr/r50"]


NAMES = (
    (r"^model\.", ""),
    (r"^input_projection\.", "neck.projections.res5."),
    (r"^query_position_embeddings\.", "head.query_embed."),
    (r"^decoder\.ref_point_head\.", "head.ref_point_head."),
    (r"^class_labels_classifier\.", "head.class_embed."),
    (r"^bbox_predictor\.", "head.bbox_embed."),
    (r"^(encoder|decoder)\.", r"head.\1."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.q_pos_sine_proj\.", ".q_spatial_proj."),
    (r"\.o_proj\.", ".out_proj."),
    (r"\.mlp\.fc([12])\.", r".ffn.linear\1."),
    (r"decoder\.layernorm\.", "decoder.norm."),
    (r"\.self_attn_layer_norm\.", ".norm1."),
    (r"\.encoder_attn_layer_norm\.", ".norm2."),
    (r"(decoder\.layers\.\d+)\.final_layer_norm\.", r"\1.norm3."),
    (r"(encoder\.layers\.\d+)\.final_layer_norm\.", r"\1.norm2."),
)
"""Renames from transformers' names."""


def test_head_equals_an_independent_implementation(config):
    transformers = pytest.importorskip("transformers", reason="needs pip install -e '.[benchmark]'")
    torch.manual_seed(0)
    theirs = transformers.ConditionalDetrForObjectDetection(
        transformers.ConditionalDetrConfig(
            num_labels=3, num_queries=5, d_model=32, encoder_layers=1, decoder_layers=3, encoder_ffn_dim=16,
            decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
            use_timm_backbone=True, backbone="resnet18", use_pretrained_backbone=False,
        )
    ).eval()  # fmt: skip
    for name, parameter in theirs.named_parameters():
        if "backbone" not in name:
            torch.nn.init.normal_(parameter, mean=float("norm.weight" in name), std=1.0 if "embed" in name else 0.4)
    state = {}
    for key, value in theirs.state_dict().items():
        for pattern, replacement in NAMES:
            key = re.sub(pattern, replacement, key)
        if not key.startswith("backbone."):
            state[key] = value
    for key in [key for key in state if key.startswith("head.encoder.") and ".q_proj." in key]:
        parts = [state.pop(key.replace("q_proj", f"{name}_proj")) for name in "qkv"]
        state[key.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    ours = build().eval()
    missing, unexpected = ours.load_state_dict(state, strict=False)
    assert not unexpected and all(name.startswith("backbone.") for name in missing)

    images = torch.randn(2, 3, 128, 160)
    mask = torch.zeros(2, 128, 160, dtype=torch.bool)
    mask[1, 96:], mask[1, :, 128:] = True, True
    with torch.no_grad():
        maps = theirs.model.backbone(images, (~mask).long())
        expected = theirs(images, (~mask).long())
        # Both heads read the same map: transformers' backbone may store its weights under any names.
        outputs = ours.head(ours.neck({"res5": maps[-1][0]}), mask)
    for values in (expected.logits, expected.pred_boxes):
        assert values.std(dim=(0, 1)).max() > 0.1  # queries and images differ, so that the comparison is meaningful
    torch.testing.assert_close(outputs["pred_logits"], expected.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(outputs["pred_boxes"], expected.pred_boxes, atol=1e-4, rtol=1e-4)
