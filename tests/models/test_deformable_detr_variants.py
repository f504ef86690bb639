"""The variants without a golden file equal an independent implementation, transformers', with the same weights."""

import re

import pytest
import torch

from vitkit.engine.build import build_model
from vitkit.registry import CRITERIA
from vitkit.weights import load_weights

transformers = pytest.importorskip("transformers", reason="the comparison needs pip install -e '.[benchmark]'")

NAMES = (
    (r"^model\.backbone\.(?:conv_encoder\.)?model\.", "backbone.0.body."),
    (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.mlp\.fc([12])\.", r".linear\1."),
    (r"(encoder\.layers\.\d+)\.self_attn_layer_norm\.", r"\1.norm1."),
    (r"(encoder\.layers\.\d+)\.final_layer_norm\.", r"\1.norm2."),
    (r"(decoder\.layers\.\d+)\.encoder_attn_layer_norm\.", r"\1.norm1."),
    (r"(decoder\.layers\.\d+)\.self_attn_layer_norm\.", r"\1.norm2."),
    (r"(decoder\.layers\.\d+)\.final_layer_norm\.", r"\1.norm3."),
    (r"^model\.input_proj\.", "input_proj."),
    (r"^model\.query_position_embeddings\.", "query_embed."),
    (r"^model\.", "transformer."),
)
"""Renames from transformers' names to the original's."""


def official_state(theirs, num_heads):
    """Return transformers' weights under the original's names: q, k and v in one matrix, heads once per layer."""
    state = {}
    for key, value in theirs.state_dict().items():
        for pattern, replacement in NAMES:
            key = re.sub(pattern, replacement, key)
        state[key] = value
    for key in [key for key in state if ".self_attn.q_proj." in key]:
        parts = [state.pop(key.replace("q_proj", f"{name}_proj")) for name in "qkv"]
        state[key.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    for part in ("class_embed", "bbox_embed"):
        for i in range(1, num_heads):
            for key in [key for key in state if key.startswith(f"{part}.0.")]:
                state.setdefault(key.replace(f"{part}.0.", f"{part}.{i}."), state[key])
    return state


@pytest.mark.parametrize("variant", ["plain", "refine", "two_stage", "single_scale"])
def test_every_variant_equals_an_independent_implementation(variant):
    torch.manual_seed(0)
    refine, two_stage = variant in ("refine", "two_stage"), variant == "two_stage"
    levels = 1 if variant == "single_scale" else 4
    theirs = transformers.DeformableDetrForObjectDetection(
        transformers.DeformableDetrConfig(
            num_labels=7,
            num_queries=20,
            two_stage_num_proposals=20,
            d_model=64,
            encoder_layers=2,
            decoder_layers=3,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            auxiliary_loss=True,
            num_feature_levels=levels,
            two_stage=two_stage,
            with_box_refine=refine,
            class_cost=2,
            bbox_cost=5,
            giou_cost=2,
        )
    ).eval()
    for name, parameter in theirs.named_parameters():
        if "backbone" not in name:
            torch.nn.init.normal_(parameter, std=0.5 if "bias" in name else 0.12)
    ours = build_model(
        dict(
            type="DeformableDETR",
            num_queries=20,
            num_classes=7,
            backbone=dict(
                type="ResNet",
                depth=50,
                norm="frozen_bn",
                out_features=["res5"] if levels == 1 else ["res3", "res4", "res5"],
            ),
            neck=dict(type="PyramidProjection", out_channels=64, num_levels=levels),
            head=dict(
                type="DeformableDETRHead",
                d_model=64,
                d_ffn=96,
                dropout=0.0,
                num_encoder_layers=2,
                num_decoder_layers=3,
                refine_boxes=refine,
                two_stage=two_stage,
            ),
        )
    ).eval()
    report = load_weights(ours, official_state(theirs, num_heads=4 if two_stage else 3), strict=False)
    assert report.converter == "fundamentalvision/Deformable-DETR"
    assert not report.missing and all(key.startswith("backbone.") for key in report.unexpected), report

    images = torch.randn(2, 3, 128, 160)
    mask = torch.zeros(2, 128, 160, dtype=torch.bool)
    mask[1, 100:], mask[1, :, 120:] = True, True
    labels = [
        dict(class_labels=torch.tensor([1, 3]), boxes=torch.tensor([[0.3, 0.4, 0.2, 0.3], [0.6, 0.5, 0.5, 0.4]])),
        dict(class_labels=torch.tensor([0]), boxes=torch.tensor([[0.5, 0.6, 0.3, 0.2]])),
    ]
    with torch.no_grad():
        expected = theirs(images, (~mask).long(), labels=labels)
        outputs = ours(images, mask)
    torch.testing.assert_close(outputs["pred_logits"], expected.logits, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(outputs["pred_boxes"], expected.pred_boxes, atol=2e-4, rtol=1e-4)
    if two_stage:
        torch.testing.assert_close(
            outputs["training_outputs"][0]["pred_logits"], expected.enc_outputs_class, atol=2e-4, rtol=1e-4
        )

    criterion = CRITERIA.build(
        dict(
            type="SetCriterion",
            class_loss="focal",
            weights=dict(labels=1.0, l1=1.0, giou=1.0),
            matcher=dict(type="HungarianMatcher", activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0),
        )
    )
    targets = [dict(labels=t["class_labels"], boxes_cxcywh=t["boxes"]) for t in labels]
    losses = criterion.eval()(outputs, targets)
    for name, key in (("labels", "loss_ce"), ("l1", "loss_bbox"), ("giou", "loss_giou")):
        for prefix, suffix in (("", ""), ("aux0_", "_0"), ("aux1_", "_1")):
            assert losses[prefix + name].item() == pytest.approx(expected.loss_dict[key + suffix].item(), rel=1e-3)
