"""RT-DETR's weights under the names of the original repository, and in folders of the transformers library."""

import json

import pytest
import torch
from helpers.transformers_models import build_theirs
from helpers.weights import assert_same_weights
from torch import nn

import vitkit
from vitkit import CheckpointError, ConfigError, build_model, load_weights, model_zoo
from vitkit.config import load_config
from vitkit.io.coco_classes import COCO_CLASSES
from vitkit.model_zoo.converters import write_names
from vitkit.weights import load_pretrained

BATCH_NORM = ("weight", "bias", "running_mean", "running_var")
MLP = [f"layers.{i}.{leaf}" for i in range(3) for leaf in ("weight", "bias")]


def config(name="rtdetr_r18", **head):
    """Return a published config with a small neck and decoder."""
    cfg = load_config(name)
    cfg["model"]["backbone"]["pretrained"] = False
    cfg["model"]["neck"].update(out_channels=32, num_heads=2, d_ffn=32)
    cfg["model"]["head"].update(d_model=32, num_heads=2, d_ffn=32, num_decoder_layers=2, **head)
    return cfg


def random_model(cfg, **options):
    torch.manual_seed(3)
    model = build_model(cfg["model"], **options).eval()
    for value in (*model.parameters(), *(v for k, v in model.named_buffers() if v.is_floating_point())):
        nn.init.uniform_(value, 0.1, 0.9)
    return model


def original_keys(depth, version, num_layers):
    """Return the keys of the original's state dict, as its modules name them."""
    blocks, branches = {18: ([2, 2, 2, 2], "ab"), 50: ([3, 4, 6, 3], "abc")}[depth]
    keys, norms = [], []

    def conv_norm(prefix, conv="conv", norm="norm", counts=True):
        keys.append(f"{prefix}{conv}.weight")
        norms.append((f"{prefix}{norm}.", counts))

    for i in (1, 2, 3):
        conv_norm(f"backbone.conv1.conv1_{i}.", counts=depth < 50)
    for stage, count in enumerate(blocks):
        for block in range(count):
            prefix = f"backbone.res_layers.{stage}.blocks.{block}."
            for branch in branches:
                conv_norm(f"{prefix}branch2{branch}.", counts=depth < 50)
        conv_norm(f"backbone.res_layers.{stage}.blocks.0.short.{'conv.' if stage else ''}", counts=depth < 50)
    for i in range(3):
        conv_norm(f"encoder.input_proj.{i}.", *(("0", "1") if version == 1 else ("conv", "norm")))
        conv_norm(f"decoder.input_proj.{i}.")
    for i in range(2):
        for name in ("lateral_convs", "downsample_convs"):
            conv_norm(f"encoder.{name}.{i}.")
        for name in ("fpn_blocks", "pan_blocks"):
            for k in range(1, 4 if depth < 50 else 3):
                conv_norm(f"encoder.{name}.{i}.conv{k}.")
            for j in range(3):
                for k in (1, 2):
                    conv_norm(f"encoder.{name}.{i}.bottlenecks.{j}.conv{k}.")
    for prefix, counts in norms:
        keys += [f"{prefix}{leaf}" for leaf in (*BATCH_NORM, *(["num_batches_tracked"] if counts else []))]

    def layer(prefix, names):
        for name in (*names, "linear1", "linear2", "self_attn.out_proj"):
            keys.extend(f"{prefix}{name}.{leaf}" for leaf in ("weight", "bias"))
        keys.extend(f"{prefix}self_attn.in_proj_{leaf}" for leaf in ("weight", "bias"))

    layer("encoder.encoder.0.layers.0.", ("norm1", "norm2"))
    cross = [f"cross_attn.{n}" for n in ("sampling_offsets", "attention_weights", "value_proj", "output_proj")]
    for i in range(num_layers):
        layer(f"decoder.decoder.layers.{i}.", ("norm1", "norm2", "norm3", *cross))
        keys += [f"decoder.dec_bbox_head.{i}.{rest}" for rest in MLP]
    linears = [f"dec_score_head.{i}" for i in range(num_layers)] + ["enc_score_head"]
    linears += [f"enc_output.{part}" for part in (("0", "1") if version == 1 else ("proj", "norm"))]
    keys += [f"decoder.{name}.{leaf}" for name in linears for leaf in ("weight", "bias")]
    keys += [f"decoder.enc_bbox_head.{rest}" for rest in MLP]
    keys += [f"decoder.query_pos_head.{rest}" for rest in MLP[:4]] + ["decoder.denoising_class_embed.weight"]
    if version == 2:
        keys += ["decoder.anchors", "decoder.valid_mask"]
        keys += [f"decoder.decoder.layers.{i}.cross_attn.num_points_scale" for i in range(num_layers)]
    return set(keys)


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("version", [1, 2])
def test_official_names_are_those_of_the_original_and_are_read_back_exactly(depth, version):
    cfg = config(f"rtdetr{'v2' if version == 2 else ''}_r{depth}")
    model = random_model(cfg, classes=COCO_CLASSES)
    result = write_names(model, "official")
    assert result.format == f"lyuwenyu/RT-DETR{', v2' if version == 2 else ''}"
    assert result.state.keys() == original_keys(depth, version, num_layers=2)
    again = build_model(cfg["model"], classes=COCO_CLASSES)
    # As published: a moving average with settings of its own.
    report = load_weights(again, {"ema": {"module": result.state, "updates": 3}}, classes=COCO_CLASSES)
    assert report.converter == result.format and not report.missing and not report.unexpected
    assert_same_weights(again, model)


def test_norms_of_the_decoder_are_numbered_in_the_order_of_the_original():
    model = random_model(config(), classes=COCO_CLASSES)
    state, layer = write_names(model, "official").state, model.head.decoder.layers[0]
    # In the original norm1 follows the self-attention; in vitkit, as in Deformable DETR, the cross-attention.
    assert torch.equal(state["decoder.decoder.layers.0.norm1.weight"], layer.norm2.weight)
    assert torch.equal(state["decoder.decoder.layers.0.norm2.weight"], layer.norm1.weight)


def test_second_version_has_the_anchors_of_its_evaluated_size():
    state = write_names(
        random_model(config("rtdetrv2_r18", num_points=[3, 1, 2]), classes=COCO_CLASSES), "official"
    ).state
    assert state["decoder.anchors"].shape == (1, 80 * 80 + 40 * 40 + 20 * 20, 4)
    # The first location is too near to the edge; the last map's middle has a box of a fifth of the image.
    assert torch.isinf(state["decoder.anchors"][0, 0]).all() and not state["decoder.valid_mask"][0, 0]
    box = state["decoder.anchors"][0, 8000 + 10 * 20 + 10].sigmoid()
    torch.testing.assert_close(box, torch.tensor([0.525, 0.525, 0.2, 0.2]))
    scales = state["decoder.decoder.layers.1.cross_attn.num_points_scale"]
    torch.testing.assert_close(scales, torch.tensor([1 / 3] * 3 + [1.0] + [0.5] * 2))


def test_names_load_from_their_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    for name in ("rtdetr_r18", "rtdetrv2_r18_discrete"):
        entry = model_zoo.index()[name]
        cfg = load_config(entry["config"], entry.get("overrides", ()))
        model = random_model(cfg, classes=COCO_CLASSES)
        file = tmp_path / f"{name}.pth"
        torch.save({"ema": {"module": write_names(model, "official").state, "updates": 1}, "last_epoch": 71}, file)
        monkeypatch.setattr(model_zoo, "index", lambda n=name, e=entry, f=file: {n: dict(e, url=f.as_uri())})
        predictor = vitkit.load(name)
        assert predictor.classes == list(COCO_CLASSES) and str(predictor.report).endswith(
            write_names(model, "official")[1]
        )
        assert predictor.transforms.size == (640, 640)
        assert tuple(predictor.model.backbone.pixel_mean) == (0, 0, 0)
        assert torch.equal(predictor.model.head.class_embed[2].weight, model.head.class_embed[2].weight)
        monkeypatch.undo()
        monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))


def test_backbones_weights_load_by_the_originals_names(tmp_path):
    model = random_model(config()).backbone
    full = write_names(random_model(config(), classes=COCO_CLASSES), "official").state
    file = tmp_path / "ResNet18_vd_pretrained_from_paddle.pth"
    torch.save({k.removeprefix("backbone."): v for k, v in full.items() if k.startswith("backbone.")}, file)
    cfg = config()
    cfg["model"]["backbone"]["pretrained"] = str(file)
    backbone = build_model(cfg["model"]).backbone
    load_pretrained(backbone)
    assert torch.equal(backbone.layer4[0].downsample[1].weight, model.layer4[0].downsample[1].weight)
    assert torch.equal(backbone.bn1.running_var, model.bn1.running_var)


@pytest.mark.parametrize("num_classes", [3, 365])
def test_heads_of_other_classes_are_new_only_in_training(num_classes, tmp_path):
    """Own classes, and those of Objects365."""
    theirs = write_names(random_model(config(), classes=COCO_CLASSES), "official").state
    if num_classes == 365:
        cfg = config()
        cfg["model"]["num_classes"] = 365
        theirs = write_names(random_model(cfg), "official").state
        classes, line = COCO_CLASSES, "lyuwenyu/RT-DETR with 365 classes .Objects365."
    else:
        classes, line = ["flame", "smoke", "ash"], "lyuwenyu/RT-DETR with 80 classes .COCO's things."
    model = build_model(config()["model"], classes=classes)
    with pytest.raises(CheckpointError, match=f"class head is for other classes(.|\n)*{line}"):
        load_weights(model, theirs, classes=classes)
    report = load_weights(model, theirs, classes=classes, new_class_head=True)
    assert {"head.proposals.class_embed.bias", "head.class_embed.1.weight"} <= set(report.reinitialized)
    assert torch.equal(model.head.decoder.bbox_embed[1].layers[0].bias, theirs["decoder.dec_bbox_head.1.layers.0.bias"])
    # As many classes, but others.
    others = [f"thing {i}" for i in range(80)]
    if num_classes == 3:
        with pytest.raises(CheckpointError, match="class head is for other classes"):
            load_weights(build_model(config()["model"], classes=others), theirs, classes=others)


def test_weights_of_other_models_are_named():
    state = write_names(random_model(config(), classes=COCO_CLASSES), "official").state
    detr = build_model(load_config("detr_r50", ["model.backbone.pretrained=false"])["model"])
    with pytest.raises(CheckpointError, match="does not fit DETR(.|\n)*seems to be lyuwenyu/RT-DETR with 80 classes"):
        load_weights(detr, state)
    dfine = load_config("dfine_n_coco", ["model.backbone.pretrained=false"])["model"]
    torch.manual_seed(0)
    theirs = write_names(build_model(dfine, classes=COCO_CLASSES), "official").state
    with pytest.raises(CheckpointError, match=r"does not fit RTDETR(.|\n)*seems to be Peterande/D-FINE with 80"):
        load_weights(build_model(config()["model"]), theirs)
    with pytest.raises(CheckpointError, match=r"does not fit DFINE(.|\n)*seems to be lyuwenyu/RT-DETR with 80"):
        load_weights(build_model(dfine), state)
    official = write_names(detr, "official").state
    with pytest.raises(CheckpointError, match="does not fit RTDETR(.|\n)*seems to be facebookresearch/detr with 91"):
        load_weights(build_model(config()["model"]), official)
    deeper = config()
    deeper["model"]["head"]["num_decoder_layers"] = 3
    with pytest.raises(CheckpointError, match=r"missing \(\d+\): head.decoder.layers.2(.|\n)*"):
        load_weights(build_model(deeper["model"]), state)


def folder_of(tmp_path, **changes):
    transformers = pytest.importorskip("transformers", reason="the comparison needs pip install -e '.[benchmark]'")
    build_theirs(transformers, changes.pop("name", "rt_detr")).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return tmp_path


def test_folders_say_how_pixels_are_prepared(tmp_path):
    folder = folder_of(tmp_path)
    model = vitkit.load(folder)
    assert model.transforms.size == (640, 640) and tuple(model.model.backbone.pixel_std) == (1, 1, 1)
    processor = dict(do_normalize=False, image_mean=[0.485, 0.456, 0.406], size=dict(height=320, width=480))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    model = vitkit.load(folder)
    assert model.transforms.size == (320, 480) and tuple(model.model.backbone.pixel_mean) == (0, 0, 0)
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(processor, do_normalize=True)))
    assert tuple(vitkit.load(folder).model.backbone.pixel_mean) == (0.485, 0.456, 0.406)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(encoder_layers=2), "encoder_layers=2: vitkit's model only has 1"),
        (dict(learn_initial_query=True), "learn_initial_query=True: vitkit's model only has False"),
        (dict(activation_function="relu"), "activation_function='relu': vitkit's model only has 'silu'"),
        (dict(encoder_in_channels=[1, 2, 3]), r"\[1, 2, 3\]: vitkit's model only has \[128, 256, 512\]"),
        (dict(hidden_expansion=0), "hidden_expansion=0: expected a number above 0"),
        (dict(hidden_expansion="a"), "hidden_expansion='a': expected a number above 0"),
        (dict(backbone_config=dict(model_type="swin")), "backbone 'swin': vitkit's RT-DETR knows rt_detr_resnet"),
        (dict(name="rt_detr_v2", decoder_method="nearest"), "decoder_method='nearest'"),
    ],
    ids=str,
)
def test_settings_that_vitkit_lacks_are_named(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as error:
        vitkit.load(folder_of(tmp_path, **changes))
    assert "\n" not in str(error.value)


def test_settings_that_the_library_lacks_are_named(tmp_path):
    transformers_writing = pytest.importorskip("vitkit.apps.conversion.transformers_writing")
    cfg = config("rtdetrv2_r18", num_points=[2, 4, 4])
    loaded = vitkit.apps.inference.Predictor(random_model(cfg, classes=COCO_CLASSES), COCO_CLASSES)
    with pytest.raises(
        CheckpointError, match=r"model.head.num_points=\[2, 4, 4\]: the transformers library's model has"
    ):
        transformers_writing.write_folder(tmp_path, loaded, cfg["model"])
