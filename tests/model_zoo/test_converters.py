import pytest
import torch
from torch import nn

from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError
from vitkit.io.coco_classes import COCO_CATEGORY_IDS
from vitkit.model_zoo.converters import convert_official
from vitkit.weights import load_weights

ENCODER, DECODER = "transformer.encoder.layers.0.", "transformer.decoder.layers.0."


def tiny(num_classes):
    return build_model(
        dict(
            type="DETR",
            num_queries=4,
            num_classes=num_classes,
            backbone=dict(type="ResNet", depth=18, norm="frozen_bn"),
            neck=dict(type="ChannelProjection", out_channels=8),
            head=dict(type="DETRHead", d_model=8, num_heads=2, d_ffn=8, num_encoder_layers=1, num_decoder_layers=1),
        )
    )


def official(model):
    """Return the model's state dict under the official names, written out by hand for each kind of entry."""
    names = {
        "neck.projections.res5.": "input_proj.",
        "head.encoder.layers.0.ffn.": ENCODER,
        "head.encoder.layers.0.": ENCODER,
        "head.decoder.layers.0.cross_attn.": f"{DECODER}multihead_attn.",
        "head.decoder.layers.0.ffn.": DECODER,
        "head.decoder.layers.0.": DECODER,
        "head.decoder.norm.": "transformer.decoder.norm.",
        "head.class_embed.": "class_embed.",
        "head.bbox_embed.": "bbox_embed.",
        "head.query_embed.": "query_embed.",
        "backbone.": "backbone.0.body.",
    }
    state = {}
    for key, value in model.state_dict().items():
        ours = next(prefix for prefix in names if key.startswith(prefix))
        state[names[ours] + key.removeprefix(ours)] = value.clone()
    return state


def test_official_names_become_names_of_the_model():
    model = tiny(num_classes=91)
    converted, converter = convert_official(official(model), model)
    assert converter.name == "facebookresearch/detr"
    assert converted.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(converted[key], value), key


def test_a_wrapped_checkpoint_is_unwrapped():
    model = tiny(num_classes=91)
    converted, converter = convert_official({"model": official(model), "epoch": 3}, model)
    assert converter is not None and converted.keys() == model.state_dict().keys()


def test_91_raw_ids_become_the_80_coco_classes():
    source, model = tiny(num_classes=91), tiny(num_classes=80)
    report = load_weights(model, official(source))
    assert report.converter == "facebookresearch/detr"
    weight = source.head.class_embed.weight
    assert torch.equal(model.head.class_embed.weight[0], weight[1])  # person
    assert torch.equal(model.head.class_embed.weight[11], weight[13])  # stop sign: there is no raw id 12
    assert torch.equal(model.head.class_embed.weight[79], weight[90])  # toothbrush
    assert torch.equal(model.head.class_embed.weight[80], weight[91])  # no object
    assert model.head.class_embed.bias.shape == (81,)


def test_coco_has_80_ids_with_the_known_gaps():
    assert len(COCO_CATEGORY_IDS) == 80
    assert set(range(1, 91)) - set(COCO_CATEGORY_IDS) == {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
    assert list(COCO_CATEGORY_IDS) == sorted(COCO_CATEGORY_IDS)


def test_an_unknown_state_dict_passes_unchanged():
    state = nn.Linear(2, 2).state_dict()
    converted, converter = convert_official(state, nn.Linear(2, 2))
    assert converter is None and converted == dict(state)


def test_official_head_is_not_used_for_equally_many_other_classes():
    model, state = tiny(num_classes=91), official(tiny(num_classes=91))
    names = [f"thing {i}" for i in range(91)]
    with pytest.raises(CheckpointError, match="class head is for other classes"):
        load_weights(model, state, classes=names)
    report = load_weights(model, state, classes=names, new_class_head=True)
    assert report.reinitialized == ["head.class_embed.weight", "head.class_embed.bias"]
