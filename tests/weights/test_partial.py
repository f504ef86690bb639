"""Training that starts from a model that differs by a layer takes what fits, and says what that is."""

import pytest
import torch

import vitkit
from vitkit import build_model
from vitkit.config import load_config
from vitkit.errors import CheckpointError
from vitkit.tools import train as train_tool
from vitkit.weights import load_weights

TINY = ["data.train.num_images=4", "data.val.num_images=2", "data.images_per_gpu=2", "train.epochs=1"]


def detr(classes=("circle", "square"), **changes):
    config = load_config("quickstart/detr")
    config["model"]["head"].update(changes)
    torch.manual_seed(len(changes))
    return build_model(config["model"], classes=list(classes))


def test_entries_of_the_same_shape_are_taken_and_the_others_are_listed():
    source = detr(d_ffn=32)
    state = {name: value + 0.5 if value.is_floating_point() else value for name, value in source.state_dict().items()}
    del state["head.query_embed.weight"]
    state["head.gate.weight"] = torch.zeros(3)
    model = detr()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = load_weights(model, state, partial=True)
    after = model.state_dict()
    narrow = {name for name in after if ".ffn.linear" in name and not name.endswith("linear2.bias")}
    assert report.misshapen.keys() == narrow and report.missing == ["head.query_embed.weight"]
    assert report.misshapen["head.encoder.layers.0.ffn.linear1.weight"] == ((32, 96), (384, 96))
    assert report.unexpected == ["head.gate.weight"]
    for name, value in after.items():
        kept = name in narrow or name == "head.query_embed.weight"
        assert torch.equal(value, before[name] if kept else state[name]), name
    lines = report.table(after).splitlines()
    assert f"{len(after) - len(narrow) - 1} of the model's {len(after)} entries loaded" in lines[0]
    of_queries = next(line.split() for line in lines if line.startswith("  head.query_embed"))
    assert of_queries == ["head.query_embed", "0", "1"]
    assert "  other shape: head.encoder.layers.0.ffn.linear1.weight: checkpoint (32, 96), model (384, 96)" in lines
    assert "  new, not in the checkpoint: head.query_embed.weight" in lines
    assert "  in the checkpoint only: head.gate.weight" in lines


def test_without_partial_the_same_weights_are_an_error():
    with pytest.raises(CheckpointError, match=r"linear1.weight: checkpoint \(32, 96\), model \(384, 96\)") as caught:
        load_weights(detr(), detr(d_ffn=32).state_dict(), new_class_head=True)
    assert "To load what fits, use --init-partial of `vitkit train`" in str(caught.value)


def test_weights_without_anything_in_common_are_an_error():
    with pytest.raises(CheckpointError, match="0 of the model's") as caught:
        load_weights(detr(), {"other.weight": torch.zeros(2)}, partial=True)
    assert "init-partial" not in str(caught.value)


def test_a_class_head_of_other_classes_is_new():
    report = load_weights(detr(["a", "b", "c"]), detr().state_dict(), partial=True, new_class_head=True)
    assert report.reinitialized == ["head.class_embed.weight", "head.class_embed.bias"] and not report.misshapen
    assert "  new, for other classes: head.class_embed.weight" in report.table(detr().state_dict()).splitlines()


def test_training_starts_from_a_part_of_other_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    vitkit.train("quickstart/detr", run_dir="plain", device="cpu", **dict(text.split("=") for text in TINY))
    gated = ["examples/gated_detr/quickstart", *TINY, "--run-dir", "gated", "--device", "cpu"]
    with pytest.raises(SystemExit, match="does not fit DETR: "):
        train_tool.main([*gated, "--init", "plain"])
    capsys.readouterr()
    train_tool.main([*gated, "--init-partial", "plain"])
    printed = capsys.readouterr().err  # as the report of --init
    assert "entries loaded, 9" in printed  # percent of the values
    assert "  new, not in the checkpoint: head.decoder.layers.2.cross_attn.gate" in printed
    with pytest.raises(SystemExit):
        train_tool.main([*gated, "--init", "plain", "--init-partial", "plain"])
    assert "give one" in capsys.readouterr().err
