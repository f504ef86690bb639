"""Checkpoints of mmdetection and detrex: what they are, what they compute, and files of models that vitkit lacks.

golden/record_mmdetection.py has recorded names and outputs from the package; tests/peers compares with the package.
"""

import json
import os
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from golden.record_mmdetection import MODELS, NAME, PADDED, SIZE, fill_state, make_images
from golden.weights import HERE
from helpers.random_weights import randomize
from helpers.weights import assert_same_weights

import vitkit
from vitkit.apps.interop.toolboxes import read_text_config
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError
from vitkit.io.coco_classes import COCO_CLASSES
from vitkit.model_zoo.converters import write_names
from vitkit.registry import BACKBONES
from vitkit.weights import load_weights
from vitkit.weights.pretrained import load_backbone

SHAPES = json.loads((HERE / f"{NAME}.json").read_text(encoding="utf-8"))
CLASSES = tuple("abcdefg")


def state_of(name):
    return dict(drawn_state(name))


@cache
def drawn_state(name):
    state = fill_state(SHAPES[name])
    if name == "deformable_detr":  # whose layers share a head
        state |= {
            key.replace("branches.1.", "branches.0."): value for key, value in state.items() if "branches.1" in key
        }
    return state


def meta_of(name, classes=CLASSES):
    about = dict(classes=classes, palette=[(220, 20, 60)])
    if "panoptic" in name or name == "maskformer_without_encoder":
        about |= dict(thing_classes=classes[:4], stuff_classes=classes[4:])
    return dict(cfg=f"model = {MODELS[name]!r}\nlr = 1e-4", dataset_meta=about, epoch=12)


def saved(folder, state, meta=None, **more):
    path = folder / "epoch_12.pth"
    torch.save({"meta": meta or {}, "state_dict": state, **more}, path)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_says_what_it_is_and_computes_the_same_and_is_written_again(name, tmp_path, caplog):
    state = state_of(name)
    path = saved(tmp_path, state, meta_of(name))
    with caplog.at_level("INFO", "vitkit"):
        loaded = vitkit.load(path, training_queries=True)
    kind = {"detr": "DETR", "deformable": "Deformable DETR", "dino": "DINO", "mask2former": "Mask2Former"}
    kind = kind.get(name.partition("_")[0], "MaskFormer")
    assert re.search(f"epoch_12.pth: open-mmlab/mmdetection {kind}: .*, 12 queries, 7 classes, named in", caplog.text)
    assert loaded.classes == list(CLASSES)
    images, padding = make_images(), torch.zeros(2, *SIZE, dtype=torch.bool)
    if "mask" not in name:
        padding[1, PADDED[0] :], padding[1, :, PADDED[1] :] = True, True
    with torch.no_grad():
        outputs = loaded.model.double()(images, padding)
    with np.load(HERE / f"{NAME}.npz") as golden:
        keys = [key for key in golden.files if key.partition(".")[0] == name]
        assert len(keys) == 2
        for key in keys:
            part = key.partition(".")[2]
            ours = outputs[part][..., ::4, ::4] if part == "pred_masks" else outputs[part]
            np.testing.assert_allclose(ours, golden[key], rtol=0, atol=2e-5, err_msg=key)
            assert golden[key].std() > 0.05
    written = write_names(loaded.model.float(), "mmdetection").state
    computed = ("num_batches_tracked", "relative_position_index")
    assert {key for key in written if not key.endswith(computed)} == state.keys()
    for key, value in state.items():
        assert torch.equal(written[key], value), key


def test_a_file_without_config_and_names_is_read_by_its_shapes(tmp_path):
    for name in ("deformable_detr_two_stage", "maskformer_panoptic"):
        with pytest.raises(
            CheckpointError, match=r"epoch_12.pth: does not name its 7 classes. Name all of them in the"
        ):
            vitkit.load(saved(tmp_path, state_of(name)))
        assert vitkit.load(tmp_path / "epoch_12.pth", classes=CLASSES).classes == list(CLASSES)


@pytest.mark.parametrize("name", ["detr", "dino", "mask2former_instance"])
def test_cocos_classes_are_assumed_by_their_number_and_it_is_said(name, tmp_path):
    head = re.compile(r"fc_cls|cls_branches|cls_embed|label_embedding")
    extra = name != "dino"
    state = {k: torch.randn(80 + extra, *v.shape[1:]) if head.search(k) else v for k, v in state_of(name).items()}
    loaded = vitkit.load(saved(tmp_path, state))
    assert loaded.classes == list(COCO_CLASSES)
    assert "does not name its classes; as they are as many, they are taken for COCO's" in str(loaded.report)
    # Those that the file names are meant, in their order.
    named = vitkit.load(saved(tmp_path, state, dict(dataset_meta=dict(classes=COCO_CLASSES[::-1]))))
    assert named.classes == list(COCO_CLASSES[::-1])
    assert "taken for COCO" not in str(named.report)


def test_classes_of_mmdetection_2_are_read(tmp_path):
    loaded = vitkit.load(saved(tmp_path, state_of("detr"), dict(CLASSES=CLASSES, config="model = dict(f(1))")))
    assert loaded.classes == list(CLASSES)


def build_as_detrex(kind):
    """Return a small model with the settings of detrex."""
    sizes = dict(d_model=64, d_ffn=96, num_encoder_layers=2, num_decoder_layers=2)
    head = dict(type=f"{kind}Head", **sizes)
    neck = dict(type="PyramidProjection", in_features=["res3", "res4", "res5"], out_channels=64, num_levels=4)
    spec = dict(type=kind, num_queries=12, num_classes=7, backbone=dict(type="ResNet", depth=18, norm="frozen_bn"))
    if kind == "DETR":
        neck = dict(type="ChannelProjection", out_channels=64)
    if kind == "DINO":
        head |= dict(share_heads=False, position_offset=-0.5, temperature=10000.0)
        spec["training_queries"] = [dict(type="BoxDenoising", num_queries=10)]
    model = build_model(dict(**spec, neck=neck, head=head)).eval()
    randomize(model)
    return model


DETREX_NAMES = {
    "DETR": ["input_proj.weight", "class_embed.bias", "transformer.decoder.post_norm_layer.weight"],
    "DeformableDETR": ["query_embedding.weight", "transformer.reference_points.bias", "class_embed.1.weight"],
    "DINO": ["label_enc.weight", "transformer.tgt_embed.weight", "class_embed.2.bias", "bbox_embed.2.layers.2.bias"],
}
DETREX_NAMES["DETR"] += [
    "transformer.encoder.layers.1.attentions.0.attn.in_proj_weight", "bbox_embed.layers.2.weight",
    "transformer.decoder.layers.0.attentions.1.attn.out_proj.bias", "transformer.decoder.layers.1.norms.2.weight",
]  # fmt: skip
for own in ("DeformableDETR", "DINO"):
    DETREX_NAMES[own] += [
        "neck.extra_convs.0.norm.weight", "neck.convs.2.conv.bias", "transformer.level_embeds",
        "transformer.encoder.layers.0.attentions.0.sampling_offsets.weight", "backbone.res4.1.conv2.norm.running_var",
        "transformer.decoder.layers.1.attentions.0.attn.in_proj_bias",
        "transformer.decoder.layers.0.ffns.0.layers.1.bias",
        "transformer.decoder.layers.0.attentions.1.value_proj.weight", "backbone.stem.conv1.norm.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", DETREX_NAMES)
def test_detrex_both_ways(kind, tmp_path):
    model = build_as_detrex(kind)
    written = write_names(model, "detrex")
    assert set(DETREX_NAMES[kind]) <= written.state.keys()
    heads = ("class_embed.", "bbox_embed.") if kind != "DETR" else ()  # which files have under a second name as well
    second = {f"transformer.decoder.{key}": value for key, value in written.state.items() if key.startswith(heads)}
    torch.save({"model": written.state | second, "iteration": 90000}, tmp_path / "model_final.pth")
    with pytest.raises(CheckpointError, match="model_final.pth: does not name its 7 classes"):
        vitkit.load(tmp_path / "model_final.pth")
    loaded = vitkit.load(tmp_path / "model_final.pth", classes=CLASSES)
    images = make_images().float()
    with torch.no_grad():
        expected, outputs = model(images), loaded.model(images)
    for part in ("pred_logits", "pred_boxes"):
        torch.testing.assert_close(outputs[part], expected[part], rtol=0, atol=0)


def test_detectron2s_swin_starts_a_backbone(tmp_path):
    swin = dict(type="Swin", embed_dim=16, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2), window=4)
    backbone = BACKBONES.build(swin)
    state = {f"backbone.bottom_up.{key}": value for key, value in backbone.state_dict().items()}
    torch.save({"model": state | {"roi_heads.0.weight": torch.ones(1)}}, tmp_path / "model_final.pth")
    other = BACKBONES.build(swin)
    load_backbone(other, str(tmp_path / "model_final.pth"))
    assert_same_weights(other, backbone)


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("code_was_run",)


class Hook:
    """Pickled by reference, as mmengine's statistics and hooks are."""

    def __init__(self):
        self.history, self.path, self.table = [1.0, 2.0], Path("work_dirs"), defaultdict(list, {1: [2]})


class ConfigDict(dict):
    """Pickled as a class of its own, as mmengine's."""


def test_objects_in_a_checkpoint_are_neither_made_nor_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state, made = state_of("detr"), []
    path = saved(
        tmp_path, state, meta_of("detr") | dict(config=ConfigDict(a=ConfigDict(b=1))), hooks=[Hook()], evil=Harmful(),
        ema_state_dict={f"module.{key}": value + 1 for key, value in state.items()}, message_hub=Hook(),
    )  # fmt: skip
    monkeypatch.setattr(Hook, "__setstate__", lambda *_: made.append("hook"), raising=False)
    monkeypatch.setattr(ConfigDict, "__setitem__", lambda *_: made.append("config"))
    loaded = vitkit.load(path)
    assert not made and sorted(os.listdir()) == ["epoch_12.pth"]
    # Whoever stores averages has already exchanged the weights for them.
    assert torch.equal(loaded.model.head.query_embed.weight, state["query_embedding.weight"])


def test_wrapped_names_and_second_weights_are_removed(tmp_path):
    state = state_of("detr")
    stored = {f"module.{key}": value for key, value in state.items()}
    stored |= {"ema_" + key.replace(".", "_"): value + 1 for key, value in state.items()}
    loaded = vitkit.load(saved(tmp_path, stored, meta_of("detr")))
    assert torch.equal(loaded.model.head.query_embed.weight, state["query_embedding.weight"])


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["roi_head.bbox_head.fc_cls.weight", "roi_head.mask_head.conv_logits.weight"], "a Mask R-CNN"),
        (["roi_heads.box_predictor.cls_score.weight", "roi_heads.mask_head.predictor.weight"], "a Mask R-CNN"),
        (["rpn_head.rpn_conv.weight", "roi_head.bbox_head.fc_cls.weight"], "a Faster R-CNN"),
        (["bbox_head.retina_cls.weight"], "a RetinaNet"),
        (["bbox_head.multi_level_conv_cls.0.weight"], "a YOLOX"),
        (["model.0.conv.weight", "model.1.conv.weight", "model.22.dfl.conv.weight"], "a YOLO"),
        (
            ["decoder.layers.0.cross_attn.qcontent_proj.weight", "bbox_head.fc_cls.weight"],
            "a Conditional DETR or DAB-DETR",
        ),
        (["mask_head.mask_feature_head.convs_all_levels.0.conv0.conv.weight"], "a SOLOv2"),
    ],
)
def test_models_that_vitkit_lacks_are_named(names, kind, tmp_path):
    state = {"backbone.conv1.weight": torch.zeros(64, 3, 7, 7), **{name: torch.zeros(2, 2) for name in names}}
    path = saved(tmp_path, state)
    with pytest.raises(
        CheckpointError, match=f"epoch_12.pth: seems to be {kind}, which vitkit does not have. It has DETR"
    ):
        vitkit.load(path)
    with pytest.raises(CheckpointError, match=f"(?s)does not fit DETR.*It seems to be {kind}"):
        vitkit.load("detr_r50", path)


def test_settings_that_vitkit_lacks_are_refused(tmp_path):
    def error(change, name="detr", **state):
        config = json.loads(json.dumps(MODELS[name]))
        change(config)
        meta = meta_of(name) | dict(cfg=f"model = {config!r}")
        with pytest.raises(CheckpointError) as error:
            vitkit.load(saved(tmp_path, state_of(name) | state, meta))
        return str(error.value)

    assert "on images with channels in the order BGR (data_preprocessor.bgr_to_rgb=False)" in error(
        lambda config: config["data_preprocessor"].update(bgr_to_rgb=False)
    )
    assert "model.positional_encoding.offset=-0.5; vitkit's DETR has 0.0" in error(
        lambda config: config["positional_encoding"].update(offset=-0.5)
    )
    assert "its attentions have 4 and 8 heads" in error(
        lambda config: config["decoder"]["layer_cfg"]["self_attn_cfg"].update(num_heads=8)
    )
    assert "two stages without box refinement" in error(
        lambda config: config.update(with_box_refine=False), "deformable_detr_two_stage"
    )
    more = {"dn_query_generator.label_embedding.weight": torch.zeros(7, 64)}
    assert "has denoised queries, as a DDQ-DETR" in error(lambda _: None, "deformable_detr", **more)
    more = {"backbone.layer3.7.conv1.weight": torch.zeros(2, 2, 1, 1)}
    assert "its backbone is neither a ResNet of 18, 34, 50 or 101 layers nor a Swin" in error(lambda _: None, **more)


def test_pixels_and_sizes_of_the_config_are_those_of_the_model(tmp_path):
    config = json.loads(json.dumps(MODELS["detr"]))
    config["data_preprocessor"].update(mean=[127.5] * 3, std=[51.0] * 3)
    steps = "[dict(type='Load'), dict(type='Resize', scale=(640, 480), keep_ratio=True)]"
    text = f"model = {config!r}\ntest_pipeline = {steps}"
    loaded = vitkit.load(saved(tmp_path, state_of("detr"), meta_of("detr") | dict(cfg=text)))
    assert loaded.model.backbone.pixel_mean == pytest.approx([0.5] * 3)
    assert loaded.model.backbone.pixel_std == pytest.approx([0.2] * 3)


@pytest.mark.parametrize("name", ["detr", "dino"])
def test_other_depth_is_an_error_or_loads_what_there_is(name, tmp_path):
    state = {key: value for key, value in state_of(name).items() if not key.startswith("decoder.layers.1.")}
    if name == "detr":
        assert len(vitkit.load(saved(tmp_path, state, meta_of(name))).model.head.decoder.layers) == 1
    else:  # the head of the first stage stands where that of the last layer was
        with pytest.raises(CheckpointError, match="epoch_12.pth"):
            vitkit.load(saved(tmp_path, state, meta_of(name)))
    with pytest.raises(CheckpointError, match=r"epoch_12.pth: not all entries of open-mmlab/mmdetection DETR: "):
        broken = {key: value for key, value in state_of("detr").items() if "linear1" not in key and "ffn" not in key}
        vitkit.load(saved(tmp_path, broken, meta_of("detr")))


def test_the_text_of_a_config_is_never_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    harmful = "import os\nx = os.mkdir('ran')\ny = dict(z=os.mkdir('ran'))\nz = dict(**model)"
    text = f"model = dict(a=1, b=[dict(c=(1, 2))])\n{harmful}"
    assert read_text_config({"meta": {"cfg": text}}) == {"model": {"a": 1, "b": [{"c": (1, 2)}]}}
    assert not os.listdir()
    for damaged in ("model = dict(", "model = " + "[" * 5000, "\0", 7, None):
        assert read_text_config({"meta": {"cfg": damaged}}) == {}
    assert read_text_config({"meta": []}) == read_text_config({}) == {}


def test_conversion_writes_what_mmdetection_reads(tmp_path):
    saved(tmp_path, state_of("dino"), meta_of("dino"))
    done = vitkit.convert(tmp_path / "epoch_12.pth", tmp_path / "own.pth", to="vitkit")
    assert done.names == "vitkit" and vitkit.load(tmp_path / "own.pth").classes == list(CLASSES)
    done = vitkit.convert(tmp_path / "own.pth", tmp_path / "back.pth", to="mmdetection")
    assert done.names == "open-mmlab/mmdetection DINO"
    content = torch.load(tmp_path / "back.pth", weights_only=True)
    assert content["meta"] == {"dataset_meta": {"classes": list(CLASSES)}}
    for key, value in state_of("dino").items():
        assert torch.equal(content["state_dict"][key], value), key
    unnamed = tmp_path / "unnamed.pth"
    torch.save({"state_dict": state_of("mask2former_panoptic"), "meta": {}}, unnamed)
    with pytest.raises(CheckpointError, match="does not name its 7 classes"):
        vitkit.convert(unnamed, tmp_path / "x.pth")
    vitkit.convert(unnamed, tmp_path / "x.pth", classes=CLASSES)
    assert vitkit.load(tmp_path / "x.pth").classes == list(CLASSES)


def test_a_run_starts_from_mmdetections_weights_by_name(tmp_path):
    source = vitkit.load(saved(tmp_path, state_of("dino"), meta_of("dino"))).model
    model = vitkit.load(tmp_path / "epoch_12.pth", classes=["c", "a"]).model
    assert torch.equal(model.head.class_embed[0].weight, source.head.class_embed[0].weight[[2, 0]])
    report = load_weights(model, tmp_path / "epoch_12.pth", classes=["c", "new"], new_class_head=True)
    assert report.class_rows.new == ["new"]
