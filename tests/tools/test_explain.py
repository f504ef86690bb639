"""vitkit explain from its command line to its figures."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vitkit import AttentionRecorder, build_model, load_config
from vitkit.apps.explanations import api, dense, images
from vitkit.apps.explanations.explain_options import ExplainRequest, Explanation
from vitkit.apps.explanations.sampling import SamplingRecorder
from vitkit.data.synthetic.world import THINGS
from vitkit.errors import ConfigError
from vitkit.structures import ScoreThresholds
from vitkit.text.vocabulary import Vocabulary
from vitkit.tools import explain
from vitkit.weights import save_checkpoint

DETR = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"]["neck"]["out_channels"] = 32
    cfg["model"]["head"].update(d_model=32, num_heads=2, d_ffn=64, num_encoder_layers=2, num_decoder_layers=2)
    cfg["data"]["val"].update(num_images=6)
    cfg["data"].update(num_workers=0, val_images_per_gpu=4)
    return cfg
"""

DEFORMABLE = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"]["type"] = "DeformableDETR"
    cfg["model"]["backbone"]["out_features"] = ["res3", "res4"]
    cfg["model"]["neck"] = dict(type="PyramidProjection", out_channels=32, num_levels=3)
    cfg["model"]["head"] = dict(
        type="DeformableDETRHead", d_model=32, num_heads=4, d_ffn=64, num_encoder_layers=1, num_decoder_layers=2,
        refine_boxes=True,
    )
    cfg["data"]["val"].update(num_images=6)
    cfg["data"].update(num_workers=0, val_images_per_gpu=4)
    return cfg
"""


@pytest.fixture
def detr(tmp_path, monkeypatch) -> list[str]:
    """A config, its checkpoint and an image; the current folder is a fresh one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "detr.py").write_text(DETR)
    save_untrained(tmp_path / "detr.py", tmp_path / "detr.pth")
    pixels = np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8)
    Image.fromarray(pixels).save("noise.png")
    return ["detr.py", "detr.pth", "--image", "noise.png"]


@pytest.fixture
def deformable(detr, tmp_path) -> list[str]:
    """Return the arguments for Deformable DETR; its files are beside DETR's."""
    (tmp_path / "deformable.py").write_text(DEFORMABLE)
    save_untrained(tmp_path / "deformable.py", tmp_path / "deformable.pth")
    return ["deformable.py", "deformable.pth", *detr[2:]]


def save_untrained(config_path, checkpoint_path, classes=THINGS) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(load_config(config_path)["model"], classes=classes)
    save_checkpoint(checkpoint_path, {"model": model.state_dict(), "classes": list(classes)})
    return model


def run(*args):
    explain.main([*map(str, args), "--device", "cpu"])


def fails(*args) -> str:
    """The one-line message of a run that ends with an error."""
    with pytest.raises(SystemExit) as error:
        run(*args)
    message = str(error.value.code)
    assert message.startswith("error: ")
    return message


def usage_error(capsys, *args) -> str:
    with pytest.raises(SystemExit) as error:
        run(*args)
    assert error.value.code == 2
    return capsys.readouterr().err


def drawn(monkeypatch, name: str) -> list[dict]:
    """Record the arguments of a drawing function's calls from now on, by parameter name."""
    module = dense if hasattr(dense, name) else images
    calls, draw = [], getattr(module, name)

    def keep(*args, **kwargs):
        calls.append(inspect.signature(draw).bind(*args, **kwargs).arguments)
        draw(*args, **kwargs)

    monkeypatch.setattr(module, name, keep)
    return calls


def test_detr_attention_is_drawn_over_the_image(detr, tmp_path, capsys):
    run(*detr, "--out", "out")
    names = [f"noise_{part}{kind}.png" for part in ("decoder", "encoder") for kind in ("", "_heads")]
    drawn = sorted(path.name for path in (tmp_path / "out").glob("[!.]*"))
    assert drawn[:4] == names and len(drawn) == 5 and drawn[4].startswith("noise_query")
    for name in ("noise_decoder.png", "noise_encoder.png"):
        assert np.asarray(Image.open(tmp_path / "out" / name).convert("RGB")).std() > 10
    printed = capsys.readouterr().out
    assert "no query reaches score 0.50 (the default); the best one, " in printed
    assert "): attention in its box, relative to uniform attention: " in printed
    assert "wrote out/noise_encoder.png" in printed


def test_drawn_maps_belong_to_the_chosen_layers_points_and_queries(detr, monkeypatch):
    encoder, decoder = drawn(monkeypatch, "draw_encoder_attention"), drawn(monkeypatch, "draw_decoder_attention")
    # 50x70 pixels at stride 8 are 7x9 locations.
    run(*detr, "--encoder-layer", 0, "--points", "0,0", "69,49", "--queries", 4, 2)
    queries = decoder[0]["queries"]
    decoder_weights = torch.stack([query.weights for query in queries])
    assert encoder[0]["weights"].shape == (2, 7, 9) and decoder_weights.shape == (2, 7, 9)
    for call, weights in ((encoder[0], encoder[0]["weights"]), (decoder[0], decoder_weights)):
        assert weights.sum(dim=(1, 2)) == pytest.approx(torch.ones(2))
        assert call["covered"] == (1.0, 1.0)
    assert encoder[0]["points"] == [(0.0, 0.0), (69.0, 49.0)] and [query.query for query in queries] == [4, 2]
    assert "layer 0" in encoder[0]["title"] and "layer 1" in decoder[0]["title"]
    assert {query.name for query in queries} <= set(THINGS)

    model = save_untrained("detr.py", "again.pth").eval()
    image = torch.from_numpy(np.array(Image.open("noise.png"))).permute(2, 0, 1)[None]
    with torch.no_grad(), AttentionRecorder(model) as maps:
        outputs = model(image, torch.zeros(1, 50, 70, dtype=torch.bool))
    expected = maps["head.encoder.layers.0.self_attn"][0][0].mean(dim=0)
    assert torch.allclose(encoder[0]["weights"][1].flatten(), expected[-1], atol=1e-6)
    expected = maps["head.decoder.layers.1.cross_attn"][0][0].mean(dim=0)
    assert torch.allclose(decoder_weights.flatten(1), expected[[4, 2]], atol=1e-6)
    expected = model.postprocess(outputs, [(50, 70)])[0]
    boxes_xyxy = torch.stack([query.box_xyxy for query in queries])
    assert torch.allclose(boxes_xyxy, expected["boxes_xyxy"][[4, 2]], atol=1e-4)
    assert [query.score for query in queries] == pytest.approx(expected["scores"][[4, 2]].tolist())


def test_maps_include_padding_added_by_the_model(detr, monkeypatch):
    decoder = drawn(monkeypatch, "draw_decoder_attention")
    run(*detr, "model.isolate_padding=True")
    assert decoder[0]["covered"] == pytest.approx((56 / 50, 72 / 70))


def test_dataset_option_draws_every_image_once(detr, monkeypatch, tmp_path, capsys):
    slots = drawn(monkeypatch, "draw_query_slots")
    run(*detr[:2], "--dataset", "--queries", 3)
    assert slots[0]["boxes_cxcywh"].shape == (6, 10, 4) and slots[0]["queries"] == [3]
    # 64 pixels square: the boxes' areas in COCO's sizes.
    area = slots[0]["boxes_cxcywh"][..., 2:].prod(-1) * 64**2
    assert torch.equal(slots[1]["kinds"], (area >= 32**2).long() + (area >= 96**2))
    assert "wrote runs/explain/query_slots.png" in capsys.readouterr().out


def test_earlier_figures_stay(detr):
    for folder in ("runs/explain", "runs/explain-2"):
        run(*detr[:2], "--dataset", "--queries", 3)
        assert Path(folder, "query_slots.png").is_file()


def test_deformable_detr_draws_a_figure_per_query(deformable, monkeypatch, tmp_path, capsys):
    sampling = drawn(monkeypatch, "draw_sampling_points")
    run(*deformable, "--queries", 4, 7)
    names = sorted(path.name for path in (tmp_path / "runs" / "explain").glob("[!.]*"))
    assert names == ["noise_query4.png", "noise_query7.png"]
    assert "wrote runs/explain/noise_query7.png" in capsys.readouterr().out
    assert [call["strides"] for call in sampling] == [[8, 16, 32]] * 2

    model = save_untrained("deformable.py", "again.pth").eval()
    image = torch.from_numpy(np.array(Image.open("noise.png"))).permute(2, 0, 1)[None]
    with torch.no_grad(), SamplingRecorder(model) as samples:
        outputs = model(image, torch.zeros(1, 50, 70, dtype=torch.bool))
    first, last = sampling[1]["layers"]
    for number, (layer, output) in enumerate([(first, outputs["aux_outputs"][0]), (last, outputs)]):
        locations, weights = samples[f"head.decoder.layers.{number}.cross_attn"][0]
        assert torch.allclose(layer.locations, locations[0, 7]) and torch.allclose(layer.weights, weights[0, 7])
        assert torch.allclose(layer.box_cxcywh, output["pred_boxes"][0, 7])
        scores = output["pred_logits"][0, 7].sigmoid()
        assert layer.score == pytest.approx(scores.max().item()) and layer.name == THINGS[scores.argmax()]
    # Refinement starts the second layer from the first one's box.
    assert len(first.reference) == 2 and torch.allclose(last.reference, first.box_cxcywh)


def test_sampling_points_surround_their_reference_under_padding(deformable, monkeypatch):
    # The untrained offsets point in opposite directions, so their mean over the heads is the reference.
    sampling = drawn(monkeypatch, "draw_sampling_points")
    run(*deformable, "model.isolate_padding=True", "--queries", 1)
    layer = sampling[0]["layers"][0]
    assert torch.allclose(layer.locations.mean(dim=(0, 2)), layer.reference.expand(3, -1), atol=1e-5)


def test_deformable_detr_has_no_attention_at_a_point(deformable):
    assert "points: not for DeformableDETR on ResNet, whose figures take html, queries" in fails(
        *deformable, "--points", "1,2"
    )


def test_two_stage_queries_have_no_dataset_drawing(deformable):
    save = ["model.head.two_stage=True"]
    model = build_model(load_config("deformable.py", save)["model"], classes=THINGS)
    save_checkpoint("two_stage.pth", {"model": model.state_dict(), "classes": list(THINGS)})
    assert "queries of a two-stage model" in fails("deformable.py", "two_stage.pth", *save, "--dataset")


def test_boxes_above_the_thresholds_of_the_model_are_chosen_best_first(tmp_path):
    def queries(scores):
        labels = torch.tensor([0, 0, 1, 1])
        return images.QueryPredictions(scores, labels, torch.zeros(4, 4), None, (50, 70))

    scores = torch.tensor([0.6, 0.1, 0.9, 0.7])
    predictor = SimpleNamespace(thresholds=ScoreThresholds(0.5, (0.65, 0.8), origin="best F1"))
    default, asked = ExplainRequest(), ExplainRequest(threshold=0.5)
    result = Explanation(tmp_path)
    assert dense.choose_queries(predictor, queries(scores), default, result, 7) == [2]
    assert dense.choose_queries(predictor, queries(scores), asked, result, 7) == [2, 3, 0]
    assert dense.choose_queries(predictor, queries(scores), asked, result, 2) == [2, 3]
    assert result.notes == []
    assert dense.choose_queries(predictor, queries(scores / 10), default, result, 7) == [2]
    assert result.notes == [
        "no query reaches score 0.50 to 0.80, by class (best F1); the best one, 0.09, is drawn (see threshold)"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--image", "none.png"], "cannot read 'none.png'"),
        (["--image", "detr.py"], "not an image of a known format"),
        (["--points", "70,20"], "points: 70,20 is outside 'noise.png', which is 70x50 pixels (width x height)"),
        (["--queries", "3", "10"], "queries: got 10; the model's queries are 0 to 9"),
        (["--encoder-layer", "2"], "encoder_layer: got 2; the model's layers are 0 to 1"),
        (["--decoder-layer", "-1"], "decoder_layer: got -1; the model's layers are 0 to 1"),
    ],
)
def test_bad_arguments_are_named(detr, change, message):
    assert message in fails(*detr, *change)


def test_a_wrong_checkpoint_is_named(detr):
    assert "no checkpoint 'none.pth'" in fails(detr[0], "none.pth", *detr[2:])
    assert "does not fit DETR" in fails(*detr, "model.head.d_ffn=32")
    save_untrained("detr.py", "two.pth", classes=["cat", "dog"])
    assert "class head is for other classes" in fails(detr[0], "two.pth", "--dataset")


def test_classes_come_from_the_checkpoint(detr, monkeypatch):
    decoder = drawn(monkeypatch, "draw_decoder_attention")
    save_untrained("detr.py", "two.pth", classes=["cat", "dog"])
    run(detr[0], "two.pth", *detr[2:], "--queries", 0)
    assert decoder[0]["queries"][0].name in ("cat", "dog")


def test_usage_errors_name_what_is_missing(detr, capsys):
    assert "give --image, --text, --video, --images or --dataset" in usage_error(capsys, *detr[:2])
    for option, sources in (
        (["--points", "1,2"], "image or video"),
        (["--frame", "1"], "video"),
        (["--threshold", "0.1"], "image"),
        (["--decoder-layer", "0"], "image or text"),
        (["--html"], "image or text or video"),
    ):
        name = option[0].removeprefix("--").replace("-", "_")
        assert f"{name}: applies only to {sources}" in fails(*detr[:2], "--dataset", *option)
    assert "queries: applies only to image or dataset" in fails("runs/a", "--text", "b", "--queries", "1")
    assert "text, video: a text or a video is explained by itself" in fails(*detr[:1], "--video", "a", "--text", "b")
    assert "words: applies only to text" in fails(*detr, "--words")
    assert "'12' is not a point x,y" in usage_error(capsys, *detr, "--points", "12")
    assert "overrides go before --queries" in usage_error(capsys, *detr, "--queries", "1", "model.num_queries=10")


def save_model(tmp_path, change: str) -> list[str]:
    """Save a changed quickstart config and its checkpoint; return the tool's arguments."""
    (tmp_path / "model.py").write_text(change)
    save_untrained(tmp_path / "model.py", tmp_path / "model.pth")
    return ["model.py", "model.pth"]


MASK2FORMER = """
from vitkit.configs.quickstart.mask2former_instance import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"]["neck"].update(out_channels=32, mask_channels=16, num_layers=1, num_heads=2)
    cfg["model"]["head"].update(d_model=32, num_heads=2, d_ffn=64, num_decoder_layers=3)
    cfg["data"]["val"].update(num_images=2)
    return cfg
"""

VIT = """
from vitkit.configs.quickstart.classifier import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"]["backbone"] = dict(type="ViT", d_model=32, depth=2, num_heads=2, image_size=64)
    return cfg
"""


def test_mask_queries_are_drawn_with_boxes_around_their_masks(detr, tmp_path, monkeypatch):
    decoder = drawn(monkeypatch, "draw_decoder_attention")
    model = save_model(tmp_path, MASK2FORMER)
    run(*model, *detr[2:], "--out", "out", "--queries", 1, 4)
    names = {f"noise_{part}.png" for part in ("decoder", "decoder_heads", "query1", "query4")}
    assert {path.name for path in (tmp_path / "out").glob("[!.]*")} >= names
    assert [query.query for query in decoder[0]["queries"]] == [1, 4]
    assert all(0 <= x <= 70 and 0 <= y <= 50 for query in decoder[0]["queries"] for x, y in query.box_xyxy.view(2, 2))
    assert "points: Mask2Former has no attention from these" in fails(*model, *detr[2:], "--points", "1,2")
    assert "dataset: Mask2Former has no queries that predict boxes" in fails(*model, "--dataset")


def test_vit_draws_class_token_rollout_and_point_attention(detr, tmp_path, capsys):
    model = save_model(tmp_path, VIT)
    run(*model, *detr[2:], "--out", "out", "--points", "0,0", "69,49", "--images", ".", "--compare", *model)
    names = [f"noise_{kind}.png" for kind in ("class_token", "class_token_masks", "points", "rollout")]
    assert sorted(path.name for path in (tmp_path / "out").glob("[!.]*")) == ["attention_distance.png", *names]
    assert all(f"wrote out/{name}" in capsys.readouterr().out for name in names[:1])
    for option in (["--queries", "1"], ["--decoder-layer", "0"], ["--threshold", "0.2"]):
        name = option[0].removeprefix("--").replace("-", "_")
        assert f"{name}: not for Classifier on ViT, whose figures take" in fails(*model, *detr[2:], *option)
    assert "no folder 'noise.png'" in fails(*model, "--images", "noise.png")
    assert "points: 69,200 is outside" in fails(*model, *detr[2:], "--points", "69,200")


def test_two_checkpoints_of_a_config_are_compared(detr, tmp_path, monkeypatch):
    model = save_model(tmp_path, VIT)
    (tmp_path / "other.pth").write_bytes((tmp_path / "model.pth").read_bytes())
    compared = []
    monkeypatch.setattr(api, "plot_distances", lambda models, *_, **__: compared.extend(models))
    run(*model, "--images", ".", "--compare", model[0], "other.pth")
    assert compared == ["model.pth", "other.pth"]


def test_attention_distance_is_of_the_first_images(detr, tmp_path, monkeypatch):
    model = save_model(tmp_path, VIT)
    (tmp_path / "more").mkdir()
    for name in "abc":
        Image.new("RGB", (70, 50)).save(tmp_path / "more" / f"{name}.png")
    numbers = []
    monkeypatch.setattr(api, "plot_distances", lambda *_, num_images: numbers.append(num_images))
    run(*model, "--images", "more", "--max-images", 2)
    run(*model, "--images", "more", *detr[2:], "--max-images", 5)
    assert numbers == [2, 3]
    assert "max_images: applies only to images" in fails(*model, *detr[2:], "--max-images", 2)
    with pytest.raises(ConfigError, match="max_images: got 0; expected at least 1"):
        api.explain(*model, images="more", max_images=0)


TEXT = """
from vitkit.configs.quickstart.translation import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"].update(d_model=16, num_heads=2, d_ffn=16, num_layers=1, decoding=dict(max_length=4))
    return cfg
"""


def test_a_text_model_asks_for_text_and_names_unknown_characters(detr, tmp_path, capsys):
    (tmp_path / "text.py").write_text(TEXT)
    words = Vocabulary.train("word", ["a b"])
    vocabularies = dict.fromkeys(("source", "target"), words)
    model = build_model(load_config("text.py")["model"], vocabularies=vocabularies)
    saved = {side: vocabulary.to_json() for side, vocabulary in vocabularies.items()}
    save_checkpoint("text.pth", {"model": model.state_dict(), "vocabularies": saved})
    for source in (["--dataset"], ["--video", "a.mp4"], detr[2:]):
        assert "Transformer reads text, not images. Give a text." in fails("text.py", "text.pth", *source)
    vit = save_model(tmp_path, VIT)
    assert "Transformer reads text" in fails(*vit, "--images", ".", "--compare", "text.py", "text.pth")
    assert "text: has no token" in fails("text.py", "text.pth", "--text", " ")
    assert "decoder_layer: got 3" in fails("text.py", "text.pth", "--text", "a", "--decoder-layer", "3")
    run("text.py", "text.pth", "--text", "a b c", "--words")
    assert "1 characters or words are not in the vocabulary: 'c' 1x" in capsys.readouterr().out


def test_points_choose_what_is_drawn_of_the_backbone_below_deformable_attention(deformable, tmp_path):
    backbone = (
        'dict(type="Swin", embed_dim=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), window=4, '
        'out_features=["res3", "res4"])'
    )
    change = f'    cfg["model"]["backbone"] = {backbone}\n    return cfg'
    (tmp_path / "swin.py").write_text(DEFORMABLE.replace("    return cfg", change))
    save_untrained("swin.py", "swin.pth")
    run("swin.py", "swin.pth", *deformable[2:], "--out", "out", "--points", "3,4")
    assert (tmp_path / "out" / "noise_points.png").is_file()


def test_error_for_a_backbone_without_attention_names_alternatives(detr, tmp_path):
    model = save_model(
        tmp_path, VIT.replace('dict(type="ViT", d_model=32, depth=2, num_heads=2, image_size=64)', '"resnet18"')
    )
    assert "Classifier on ResNet has no attention in the image that can be drawn" in fails(*model, *detr[2:])
    assert "ResNet has no attention over the image; expected ViT" in fails(*model, "--images", ".")
