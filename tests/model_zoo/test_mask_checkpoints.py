"""Official checkpoints of mask classification under their official names, and checkpoints of other models."""

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.weights import assert_same_weights

from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError
from vitkit.io.coco_classes import COCO_CLASSES, COCO_PANOPTIC_CATEGORY_IDS, COCO_PANOPTIC_CLASSES
from vitkit.weights import load_weights

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = {"mask2former": "mask2former_r50_coco_instance", "maskformer": "maskformer_r50_ade20k_semantic"}
SWIN_CHANNELS = {256: 96, 512: 192, 1024: 384, 2048: 768}


def entries(name):
    """The names and shapes of an original's state dict."""
    content = json.loads((TESTS / "golden" / f"{name}.json").read_text(encoding="utf-8"))
    return {key: tuple(shape) for key, shape, *_ in content["state_dict"]}


def original(family, backbone, num_classes):
    """Return names and shapes of an official checkpoint, derived from those of R50 and Swin-T."""
    golden = entries(GOLDEN[family])
    heads = {key: shape for key, shape in golden.items() if not key.startswith("backbone.")}
    if backbone == "swin_tiny":
        own = {f"backbone.{key}": shape for key, shape in entries("swin_tiny_backbone").items()}
        for key, shape in heads.items():
            # The layers that read the backbone's maps; in Mask2Former's pyramid, only the finest one does.
            if re.search(r"adapter_\d\.weight|layer_4\.weight|input_proj\.(\d\.0\.)?weight", key):
                heads[key] = (shape[0], SWIN_CHANNELS[shape[1]], *shape[2:])
    else:
        own = {key: shape for key, shape in golden.items() if key.startswith("backbone.")}
        if backbone == "r101":
            last = {key: shape for key, shape in own.items() if key.startswith("backbone.res4.5.")}
            own |= {key.replace("res4.5.", f"res4.{i}."): s for i in range(6, 23) for key, s in last.items()}
    if family == "maskformer" and backbone in ("r50", "r101") and num_classes == 133:
        heads = with_encoder(heads)
    for key, shape in heads.items():
        if "class_embed" in key:
            heads[key] = (num_classes + 1, *shape[1:])
    return {**own, **heads, "criterion.empty_weight": (num_classes + 1,)}


def with_encoder(heads):
    """Return MaskFormer's heads for COCO: with an encoder before the FPN, whose output the queries read directly."""
    heads = {key: shape for key, shape in heads.items() if not key.startswith("sem_seg_head.predictor.input_proj.")}
    neck = "sem_seg_head.pixel_decoder."
    heads |= {
        f"{neck}layer_4.weight": (256, 256, 3, 3),
        f"{neck}input_proj.weight": (256, 2048, 1, 1),
        f"{neck}input_proj.bias": (256,),
    }
    layer = {
        "self_attn.in_proj_weight": (768, 256),
        "self_attn.in_proj_bias": (768,),
        "self_attn.out_proj.weight": (256, 256),
        "self_attn.out_proj.bias": (256,),
        "linear1.weight": (2048, 256),
        "linear1.bias": (2048,),
        "linear2.weight": (256, 2048),
        "linear2.bias": (256,),
        "norm1.weight": (256,),
        "norm1.bias": (256,),
        "norm2.weight": (256,),
        "norm2.bias": (256,),
    }
    encoder = f"{neck}transformer.encoder.layers."
    return heads | {f"{encoder}{i}.{key}": shape for i in range(6) for key, shape in layer.items()}


def filled(shapes):
    """Return a state dict in which every entry has a different value."""
    return {key: torch.full(shape, float(i)) for i, (key, shape) in enumerate(shapes.items())}


def values(state):
    return {float(value.flatten()[0]) for value in state.values()}


def model_of(config, num_classes):
    spec = load_config(config)["model"]
    with torch.device("meta"):
        model = build_model(spec | {"num_classes": num_classes})
    return model.to_empty(device="cpu")


def not_weights(key):
    return key.startswith("criterion.") or key.endswith(("relative_position_index", "num_batches_tracked"))


@pytest.mark.parametrize(
    ("config", "family", "backbone", "num_classes"),
    [
        ("mask2former_swin_tiny_coco_instance", "mask2former", "swin_tiny", 80),
        ("mask2former_r101_coco_panoptic", "mask2former", "r101", 133),
        ("maskformer_swin_tiny_ade20k", "maskformer", "swin_tiny", 150),
        ("maskformer_swin_tiny_coco_panoptic", "maskformer", "swin_tiny", 133),
        ("maskformer_r101_ade20k", "maskformer", "r101", 150),
        ("maskformer_r50_coco_panoptic", "maskformer", "r50", 133),
    ],
)
def test_every_entry_of_an_official_checkpoint_is_converted(config, family, backbone, num_classes):
    state = filled(original(family, backbone, num_classes))
    model = model_of(config, num_classes)
    report = load_weights(model, {"model": state})
    assert report.converter == f"facebookresearch/{'Mask2Former' if family == 'mask2former' else 'MaskFormer'}"
    assert not report.missing and not report.unexpected and not report.reinitialized
    weights = {key: value for key, value in state.items() if not not_weights(key)}
    loaded = {k: v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    assert values(loaded) == values(weights) and len(loaded) == len(weights)


@pytest.mark.parametrize("family", GOLDEN)
def test_names_of_the_first_releases_load(family):
    shapes = original(family, "r50", 80)
    first = {
        key.replace("sem_seg_head.pixel_decoder.", "sem_seg_head.").replace(".query_feat.", ".static_query."): value
        for key, value in filled(shapes).items()
    }
    config = {"mask2former": "mask2former_r50_coco_instance", "maskformer": "maskformer_r50_ade20k"}[family]
    ours, expected = model_of(config, 80), model_of(config, 80)
    load_weights(ours, first)
    load_weights(expected, filled(shapes))
    assert_same_weights(ours, expected)


@pytest.mark.parametrize("plus", [False, True])
def test_per_pixel_baselines_load(plus):
    shapes = original("maskformer", "r50", 150)
    predictor = "sem_seg_head.predictor."
    if plus:
        shapes = {key: shape for key, shape in shapes.items() if "class_embed" not in key}
        shapes[f"{predictor}query_embed.weight"] = (150, 256)
    else:
        shapes = {key: shape for key, shape in shapes.items() if not key.startswith(predictor)}
        shapes |= {f"{predictor}weight": (150, 256, 1, 1), f"{predictor}bias": (150,)}
    del shapes["criterion.empty_weight"]
    model = model_of(f"per_pixel_baseline_{'plus_' if plus else ''}r50_ade20k", 150)
    report = load_weights(model, filled(shapes))
    assert not report.missing and not report.unexpected
    assert len(values(filled(shapes)) - values(model.state_dict())) == 0


def test_a_detectron2_pickle_loads(tmp_path):
    state = filled(original("maskformer", "r50", 150))
    with (tmp_path / "model_final.pkl").open("wb") as file:
        pickle.dump({"model": {k: np.asarray(v, np.float16) for k, v in state.items()}, "__author__": "x"}, file)
    model = model_of("maskformer_r50_ade20k", 150)
    report = load_weights(model, tmp_path / "model_final.pkl", classes=[str(i) for i in range(150)])
    assert report.converter == "facebookresearch/MaskFormer" and not report.missing and not report.unexpected
    weight = state["sem_seg_head.predictor.query_embed.weight"]
    assert torch.equal(model.state_dict()["head.query_embed.weight"], weight)


def small(kind, num_classes, **options):
    """Build a model with few channels."""
    if kind in ("DETR", "DETRSegmentation"):
        return build_model(
            dict(
                type=kind,
                num_queries=4,
                num_classes=num_classes,
                backbone=dict(type="ResNet", depth=18, norm="frozen_bn"),
                neck=dict(type="ChannelProjection", out_channels=128),
                head=dict(
                    type="DETRHead", d_model=128, num_heads=8, d_ffn=16, num_encoder_layers=1, num_decoder_layers=2
                ),
                **options,
            )
        )
    return build_model(
        dict(
            type="Mask2Former",
            num_queries=4,
            num_classes=num_classes,
            backbone=dict(type="ResNet", depth=18, norm="frozen_bn"),
            neck=dict(type="DeformablePixelDecoder", out_channels=32, mask_channels=32, num_layers=1),
            head=dict(type="Mask2FormerHead", d_model=32, num_decoder_layers=3),
            **options,
        )
    )


def official_detr(model):
    """A small DETR's weights, with or without masks, under the original's names."""
    names = (
        (r"^backbone\.", "backbone.0.body."),
        (r"^neck\.projections\.res5\.", "input_proj."),
        (r"^head\.(class_embed|bbox_embed|query_embed)", r"\1"),
        (r"^head\.", "transformer."),
        (r"\.cross_attn\.", ".multihead_attn."),
        (r"\.ffn\.(linear\d)", r".\1"),
    )
    masks = hasattr(model, "mask_head")
    state = {}
    for key, value in model.state_dict().items():
        for pattern, replacement in names:
            key = re.sub(pattern, replacement, key)
        outside = key.startswith(("bbox_attention.", "mask_head."))
        state[f"detr.{key}" if masks and not outside else key] = value.clone()
    return state


def refusal(model, source, **options):
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, source, **options)
    return str(caught.value)


def test_panoptic_detr_loads_the_rows_of_the_133_classes():
    source = small("DETRSegmentation", 250)
    model = small("DETRSegmentation", 133)
    report = load_weights(model, official_detr(source), classes=COCO_PANOPTIC_CLASSES)
    assert not report.missing and not report.unexpected and not report.reinitialized
    weight = source.head.class_embed.weight
    assert torch.equal(model.head.class_embed.weight[:-1], weight[list(COCO_PANOPTIC_CATEGORY_IDS)])
    assert torch.equal(model.head.class_embed.weight[-1], weight[250])
    names = [f"class {i}" for i in range(133)]
    assert "250 classes (COCO panoptic's raw ids)" in refusal(model, official_detr(source), classes=names)


def test_ids_and_names_of_panoptic_classes_correspond():
    assert len(COCO_PANOPTIC_CATEGORY_IDS) == len(COCO_PANOPTIC_CLASSES) == 133
    assert list(COCO_PANOPTIC_CATEGORY_IDS) == sorted(COCO_PANOPTIC_CATEGORY_IDS)
    name_of = dict(zip(COCO_PANOPTIC_CATEGORY_IDS, COCO_PANOPTIC_CLASSES))
    assert (name_of[92], name_of[149], name_of[184], name_of[200]) == ("banner", "road", "tree-merged", "rug-merged")


def test_mask_head_is_initialized_on_a_trained_detr():
    names = [f"class {i}" for i in range(5)]
    detr, model = small("DETR", 5), small("DETRSegmentation", 5)
    fresh = {key: value.clone() for key, value in model.state_dict().items() if key.startswith(model.new_parts)}
    report = load_weights(model, {"model": detr.state_dict(), "classes": names}, classes=names, new_class_head=True)
    assert "not in it, so these are newly initialized: bbox_attention, mask_head" in str(report) and not report.missing
    assert_same_weights(model, detr.state_dict() | fresh)
    assert model.state_dict().keys() == detr.state_dict().keys() | fresh.keys()
    # Such a model must not be evaluated.
    assert "missing" in refusal(model, detr.state_dict())


def test_frozen_class_head_cannot_be_reinitialized():
    message = refusal(
        small("DETRSegmentation", 133),
        official_detr(small("DETR", 91)),
        classes=COCO_PANOPTIC_CLASSES,
        new_class_head=True,
    )
    assert "head.class_embed.weight, head.class_embed.bias would be newly initialized, but are not trained" in message
    assert "model.freeze_detr=false" in message


def test_a_checkpoint_of_another_model_is_named():
    message = refusal(small("mask", 80), official_detr(small("DETR", 91)))
    assert "does not fit Mask2Former" in message
    assert "It seems to be facebookresearch/detr with 91 classes (COCO's raw ids)." in message
    assert "use the config that it belongs to" in message


def test_a_checkpoint_of_other_classes_is_named():
    state = filled(original("mask2former", "r50", 133))
    message = refusal(model_of("mask2former_r50_ade20k_semantic", 150), state, classes=[str(i) for i in range(150)])
    assert "It seems to be facebookresearch/Mask2Former with 133 classes (COCO panoptic)." in message
    assert "Use the config of its classes and task; or, to fine-tune it, load it" in message


def test_a_run_of_another_task_is_named():
    ours = small("mask", 3, tasks=["semantic"])
    config = json.dumps(dict(model=dict(type="Mask2Former", tasks=["semantic"])))
    checkpoint = dict(model=ours.state_dict(), config=config, classes=["a", "b", "c"])
    message = refusal(small("mask", 2), checkpoint, classes=["a", "z"])
    assert "It seems to be a run of Mask2Former for semantic segmentation on 3 classes." in message
    assert "class head is for other classes" in refusal(small("mask", 3), checkpoint, classes=["x", "b", "c"])
    assert "a run of Mask2Former" in refusal(small("DETR", 3), checkpoint)
    assert "classes" in refusal(
        small("mask", 2), dict(model=ours.state_dict(), config="not JSON"), classes=COCO_CLASSES
    )
