import re

import pytest
import torch
import torch.nn.functional as F

from vitkit.engine.build import build_model
from vitkit.errors import ConfigError
from vitkit.ops import mask_postprocess
from vitkit.ops.detr_masks import instance_masks, mask_argmax, panoptic_map
from vitkit.registry import CRITERIA
from vitkit.weights import load_weights

NAMES = (
    (r"^detr\.model\.backbone\.(?:conv_encoder\.)?model\.", "detr.backbone.0.body."),
    (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),
    (r"\.encoder_attn\.o_proj\.", ".multihead_attn.out_proj."),
    (r"\.encoder_attn\.", ".multihead_attn."),
    (r"\.mlp\.fc([12])\.", r".linear\1."),
    (r"(encoder\.layers\.\d+)\.self_attn_layer_norm\.", r"\1.norm1."),
    (r"(encoder\.layers\.\d+)\.final_layer_norm\.", r"\1.norm2."),
    (r"(decoder\.layers\.\d+)\.self_attn_layer_norm\.", r"\1.norm1."),
    (r"(decoder\.layers\.\d+)\.encoder_attn_layer_norm\.", r"\1.norm2."),
    (r"(decoder\.layers\.\d+)\.final_layer_norm\.", r"\1.norm3."),
    (r"decoder\.layernorm\.", "decoder.norm."),
    (r"^detr\.model\.input_projection\.", "detr.input_proj."),
    (r"^detr\.model\.query_position_embeddings\.", "detr.query_embed."),
    (r"^detr\.class_labels_classifier\.", "detr.class_embed."),
    (r"^detr\.bbox_predictor\.", "detr.bbox_embed."),
    (r"^detr\.model\.", "detr.transformer."),
    (r"^mask_head\.conv([12])\.conv\.", r"mask_head.lay\1."),
    (r"^mask_head\.conv([12])\.norm\.", r"mask_head.gn\1."),
    (r"^mask_head\.fpn_stages\.(\d)\.fpn_adapter\.", lambda m: f"mask_head.adapter{int(m[1]) + 1}."),
    (r"^mask_head\.fpn_stages\.(\d)\.refine\.conv\.", lambda m: f"mask_head.lay{int(m[1]) + 3}."),
    (r"^mask_head\.fpn_stages\.(\d)\.refine\.norm\.", lambda m: f"mask_head.gn{int(m[1]) + 3}."),
    (r"^mask_head\.output_conv\.", "mask_head.out_lay."),
    (r"^bbox_attention\.([qk])_proj\.", r"bbox_attention.\1_linear."),
)
"""Renames from transformers' names to the original's."""


def small_spec(**options):
    return dict(
        type="DETRSegmentation",
        num_queries=6,
        num_classes=5,
        backbone=dict(type="ResNet", depth=50, norm="frozen_bn"),
        neck=dict(type="ChannelProjection", out_channels=128),
        head=dict(
            type="DETRHead", d_model=128, num_heads=8, d_ffn=64, dropout=0.0, num_encoder_layers=1, num_decoder_layers=2
        ),
        **options,
    )


def batch():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 96, 128)
    mask = torch.zeros(2, 96, 128, dtype=torch.bool)
    mask[1, 70:], mask[1, :, 100:] = True, True
    return images, mask


def test_masks_equal_an_independent_implementation():
    transformers = pytest.importorskip("transformers", reason="the comparison needs pip install -e '.[benchmark]'")
    torch.manual_seed(0)
    theirs = transformers.DetrForSegmentation(
        transformers.DetrConfig(
            num_labels=5,
            num_queries=6,
            d_model=128,
            encoder_layers=1,
            decoder_layers=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
        )
    ).eval()
    for name, parameter in theirs.named_parameters():
        if "backbone" not in name and parameter.dim() == 1 and "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    state = {}
    for key, value in theirs.state_dict().items():
        for pattern, replacement in NAMES:
            key = re.sub(pattern, replacement, key)
        state[key] = value
    for key in [key for key in state if "attn.q_proj." in key]:
        parts = [state.pop(key.replace("q_proj", f"{name}_proj")) for name in "qkv"]
        state[key.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    ours = build_model(small_spec()).eval()
    report = load_weights(ours, state, strict=False)
    assert report.converter == "facebookresearch/detr, with masks"
    assert not report.missing and all("backbone." in key for key in report.unexpected), report
    images, mask = batch()
    with torch.no_grad():
        expected = theirs(images, (~mask).long())
        outputs = ours(images, mask)
    torch.testing.assert_close(outputs["pred_logits"], expected.logits, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(outputs["pred_masks"], expected.pred_masks, atol=5e-4, rtol=1e-3)


def test_transformer_is_frozen_and_mask_head_trains():
    model = build_model(small_spec()).train()
    assert not model.head.training and model.mask_head.training
    criterion = CRITERIA.build(
        dict(
            type="SetCriterion",
            no_object_weight=0.1,
            weights=dict(labels=1.0, l1=5.0, giou=2.0, mask=1.0, dice=1.0),
            matcher=dict(type="HungarianMatcher", cost_labels=1.0, cost_l1=5.0, cost_giou=2.0),
        )
    )
    images, mask = batch()
    targets = [
        dict(
            labels=torch.tensor([0, 3]),
            boxes_cxcywh=torch.tensor([[0.3, 0.3, 0.2, 0.4], [0.6, 0.5, 0.4, 0.3]]),
            masks=torch.rand(2, 96, 128) > 0.5,
        ),
        dict(
            labels=torch.zeros(0, dtype=torch.int64),
            boxes_cxcywh=torch.zeros(0, 4),
            masks=torch.zeros(0, 70, 100, dtype=torch.bool),
        ),
    ]
    losses = criterion(model(images, mask), targets)
    assert {"mask", "dice", "aux0_labels"} <= losses.keys() and "aux0_mask" not in losses
    sum(losses.values()).backward()
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"bbox_attention", "mask_head"}
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
    empty = criterion(model(images, mask), [targets[1], targets[1]])
    assert empty.keys() == losses.keys() and empty["mask"] == 0


def test_panoptic_maps_drop_small_segments_and_reassign_their_pixels():
    rules = dict(things=[True, False, False, True, True], threshold=0.5)
    masks = torch.full((6, 8, 8), -5.0)
    masks[0, :, :4] = 5  # a thing
    masks[1, :4, 4:] = 5  # stuff
    masks[2, 4:, 4:] = 4  # the same stuff: first merged, then dropped because it has no pixels
    masks[1, 4:, 4:] = -1  # so that its pixels go to the next most confident query
    masks[3, 0, 0] = 9  # a thing of one pixel, which is dropped
    masks[4] = 8  # "no object"
    logits = torch.full((6, 6), -9.0)
    for query, label in enumerate([0, 1, 1, 3, 5, 5]):
        logits[query, label] = 9
    found = panoptic_map(logits.softmax(-1), masks, (8, 8), (8, 8), **rules)
    assert [(s["label"], s["is_thing"]) for s in found.segments] == [(0, True), (1, False)]
    assert (found.segment_ids[:, :4] == 1).all() and (found.segment_ids[:, 4:] == 2).all()
    nothing = panoptic_map(torch.full((6, 6), 1 / 6), masks, (8, 8), (4, 4), **rules)
    assert nothing.segments == [] and not nothing.segment_ids.any()


@pytest.mark.parametrize("chunk", [mask_postprocess.CHUNK_VALUES, 5000, 1])
def test_processing_masks_in_chunks_equals_processing_all_at_once(chunk, monkeypatch):
    monkeypatch.setattr(mask_postprocess, "CHUNK_VALUES", chunk)
    torch.manual_seed(0)
    masks, padded, image, original = torch.randn(7, 8, 12), (32, 48), (29, 40), (51, 77)
    masks[5] = masks[2]  # among equal masks, the first owns a pixel
    whole = F.interpolate(masks[None], padded, mode="bilinear", align_corners=False)[0]
    assert torch.equal(mask_argmax(masks, padded), whole.argmax(0))
    cut = (whole[:, : image[0], : image[1]].sigmoid() > 0.5).float()
    expected = F.interpolate(cut[None], original, mode="nearest")[0].bool()
    assert torch.equal(instance_masks(masks, padded, image, original), expected)


def test_post_processing_of_a_large_image_never_holds_all_masks_at_once(monkeypatch):
    monkeypatch.setattr(mask_postprocess, "CHUNK_VALUES", 2 * 64 * 96)
    sizes, interpolate = [], F.interpolate
    monkeypatch.setattr(
        F, "interpolate", lambda *args, **kwargs: sizes.append(interpolate(*args, **kwargs)) or sizes[-1]
    )
    model = build_model(small_spec(tasks=["instance", "panoptic"], object_threshold=0.1))
    outputs = dict(
        pred_logits=9 * torch.eye(6)[None],
        pred_boxes=torch.rand(1, 6, 4),
        pred_masks=torch.randn(1, 6, 16, 24),
        input_size=(64, 96),
        image_sizes=torch.tensor([[64, 96]]),
    )
    (result,) = model.postprocess(outputs, [(64, 96)])
    assert len(result["segments_info"]) > 2 and result["masks"].any(0).any()
    assert max(x.numel() for x in sizes) == 2 * 64 * 96


def test_instance_masks_are_cropped_and_resized():
    model = build_model(small_spec(tasks=["instance"])).eval()
    images, mask = batch()
    with torch.no_grad():
        results = model.postprocess(model(images, mask), [(50, 60), (140, 200)])
    assert [tuple(r["masks"].shape) for r in results] == [(6, 50, 60), (6, 140, 200)]
    assert {"scores", "labels", "boxes_xyxy", "masks"} == results[0].keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tasks=["panoptics"]), "unknown task 'panoptics'. Did you mean 'panoptic'"),
        (dict(backbone=dict(type="ResNet", depth=18, out_features=["res4", "res5"])), "needs four maps"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_model({**small_spec(), **changes})
