"""vitkit average: the mean of several checkpoints."""

import pytest
import torch
from torch import nn

from vitkit import load_weights
from vitkit.tools import average
from vitkit.weights import read_checkpoint


class Model(nn.Module):
    def __init__(self, classes=2, value=0.0):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(2, classes)
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)


def save(path, *, value=0.0, classes=("cat", "dog"), count=0, **more):
    model = Model(len(classes), value)
    model.norm.num_batches_tracked.fill_(count)
    torch.save({"model": model.state_dict(), "classes": list(classes), "config": "{}", **more}, path)
    return str(path)


def fails(capsys, *args):
    with pytest.raises(SystemExit) as error:
        average.main([*map(str, args)])
    return f"{error.value.code}\n{capsys.readouterr().err}"


def test_weights_are_averaged_and_counters_taken_from_the_last_file(tmp_path, capsys):
    files = [save(tmp_path / f"{k}.pth", value=v, count=c) for k, v, c in ((0, 1.0, 5), (1, 2.0, 7), (2, 6.0, 9))]
    average.main([*files, "--out", str(tmp_path / "mean.pth")])
    saved = read_checkpoint(tmp_path / "mean.pth")
    assert saved["model"]["conv.weight"].unique().tolist() == [3.0]
    assert saved["model"]["norm.num_batches_tracked"] == 9
    assert saved["classes"] == ["cat", "dog"] and saved["averaged"] == files
    model = Model()
    load_weights(model, tmp_path / "mean.pth", classes=["cat", "dog"])
    assert model.head.weight.unique().tolist() == [3.0]
    assert "0.333 x " in capsys.readouterr().out


def test_averaging_weights_can_be_given_and_moving_averages_are_used(tmp_path):
    a = save(tmp_path / "a.pth", value=1.0)
    b = save(tmp_path / "b.pth", value=100.0, ema=Model(2, 5.0).state_dict())
    average.main([a, b, "--factors", "3", "1", "--out", str(tmp_path / "mean.pth")])
    assert read_checkpoint(tmp_path / "mean.pth")["model"]["head.bias"].unique().tolist() == [2.0]


def test_one_file_is_slimmed_to_its_weights(tmp_path):
    state = {"progress": {"step": 5}, "optimizer": {"state": {0: {"exp_avg": torch.ones(10**6)}}}}
    path = save(tmp_path / "last.pth", value=2.0, ema=Model(2, 5.0).state_dict(), vocabularies={}, **state)
    average.main([path, "--out", str(tmp_path / "slim.pth")])
    slim = read_checkpoint(tmp_path / "slim.pth")
    assert slim.keys() == {"model", "config", "classes", "vocabularies", "averaged"}
    assert all(slim["model"][name].equal(value) for name, value in Model(2, 5.0).state_dict().items())
    assert (tmp_path / "slim.pth").stat().st_size < 10**4


def test_last_files_of_a_pattern_are_chosen_by_number(tmp_path):
    for step in (2, 10, 9):
        save(tmp_path / f"step_{step}.pth", value=float(step))
    average.main([str(tmp_path / "step_*.pth"), "--last", "2", "--out", str(tmp_path / "mean.pth")])
    assert read_checkpoint(tmp_path / "mean.pth")["model"]["head.bias"].unique().tolist() == [9.5]


def test_half_precision_is_kept_but_summed_in_higher_precision(tmp_path):
    for k in range(3):
        torch.save({"model": {"w": torch.full((1,), 60000.0, dtype=torch.float16)}}, tmp_path / f"{k}.pth")
    average.main([str(tmp_path / "?.pth"), "--out", str(tmp_path / "mean.pth")])
    mean = read_checkpoint(tmp_path / "mean.pth")["model"]["w"]
    assert mean.dtype == torch.float16 and mean.item() == 60000


def test_other_models_and_classes_are_refused(tmp_path, capsys):
    first = save(tmp_path / "a.pth")
    out = ["--out", tmp_path / "mean.pth"]
    other = save(tmp_path / "b.pth", classes=("cat", "cow"))
    assert "was trained on other classes" in fails(capsys, first, other, *out)
    words = [save(tmp_path / f"{word}.pth", vocabularies={"target": {"words": [word]}}) for word in ("ein", "zwei")]
    assert "was trained with other vocabularies than" in fails(capsys, *words, *out)
    more = save(tmp_path / "c.pth", classes=("a", "b", "c"))
    assert "head.weight is (3, 2), but (2, 2) in " in fails(capsys, first, more, *out)
    torch.save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "d.pth")
    assert "is from another model than" in fails(capsys, first, tmp_path / "d.pth", *out)
    nan = save(tmp_path / "e.pth", value=float("nan"))
    assert "is not finite" in fails(capsys, first, nan, *out)
    assert not (tmp_path / "mean.pth").exists()


def test_wrong_arguments_are_helpful_errors(tmp_path, capsys):
    first, second = save(tmp_path / "a.pth"), save(tmp_path / "b.pth")
    out = ["--out", tmp_path / "mean.pth"]
    assert "is named twice" in fails(capsys, first, first, *out)
    assert "none.pth'. " in fails(capsys, first, tmp_path / "none.pth", *out)
    assert "only a name of the model zoo; expected a file" in fails(capsys, first, "shapes_dino", *out)
    assert "no file matches this pattern" in fails(capsys, tmp_path / "x*.pth", *out)
    assert "got 1 for 2 checkpoints" in fails(capsys, first, second, "--factors", "1", *out)
    for weights in (["0", "0"], ["1", "nan"], ["inf", "1"], ["1e308", "1e308"]):
        assert "expected finite numbers of at least 0, not all of them 0" in fails(
            capsys, first, second, "--factors", *weights, *out
        )
    assert "exists already" in fails(capsys, first, second, "--out", second)
    assert "is a folder" in fails(capsys, first, second, "--out", tmp_path, "--overwrite")
    (tmp_path / "c.pth").write_bytes(b"nothing")
    assert "not a PyTorch checkpoint" in fails(capsys, first, tmp_path / "c.pth", *out)
