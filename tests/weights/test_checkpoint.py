import os
import pickle
import re
import zipfile

import pytest
import torch
from torch import nn

from vitkit.errors import CheckpointError
from vitkit.weights import load_weights, read_checkpoint, save_checkpoint
from vitkit.weights.reading import read_metadata


class TinyDetector(nn.Module):
    class_head = ("classes.",)

    def __init__(self, num_classes: int = 3):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.neck = nn.Linear(8, 8)
        self.classes = nn.Linear(8, num_classes)


def test_saved_values_are_read_back(tmp_path):
    model = TinyDetector()
    save_checkpoint(tmp_path / "last.pth", {"model": model.state_dict(), "classes": ["a", "b", "c"]})
    assert [p.name for p in tmp_path.iterdir()] == ["last.pth"]
    other = TinyDetector()
    report = load_weights(other, tmp_path / "last.pth", classes=["a", "b", "c"])
    assert torch.equal(other.body.weight, model.body.weight)
    assert not report.missing and not report.unexpected and not report.reinitialized


def test_the_moving_average_is_preferred(tmp_path):
    model, average = TinyDetector(), TinyDetector()
    save_checkpoint(tmp_path / "last.pth", {"model": model.state_dict(), "ema": average.state_dict()})
    other = TinyDetector()
    load_weights(other, tmp_path / "last.pth")
    assert torch.equal(other.body.weight, average.body.weight)


def test_a_missing_checkpoint_names_the_nearest(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"no checkpoint .*lst\.pth'\. There is none in '"):
        read_checkpoint(tmp_path / "lst.pth")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"^no checkpoint 'lst\.pth'\. There is none in the current folder\.$"):
        read_checkpoint("lst.pth")
    (tmp_path / "last.pth").touch()
    with pytest.raises(CheckpointError, match=r"no checkpoint .*lst\.pth.*Did you mean 'last\.pth'"):
        read_checkpoint(tmp_path / "lst.pth")
    (tmp_path / "best.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"no checkpoint .*bst\.safetensors.*'best\.safetensors'"):
        read_checkpoint(tmp_path / "bst.safetensors")


def test_a_truncated_checkpoint_is_named(tmp_path):
    path = tmp_path / "last.pth"
    save_checkpoint(path, {"model": TinyDetector().state_dict()})
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"last\.pth: truncated or damaged"):
        read_checkpoint(path)


def test_a_checkpoint_too_large_for_the_memory_is_not_called_damaged_only(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "last.pth", {"model": TinyDetector().state_dict()})

    def no_memory(*args, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 9 bytes")

    monkeypatch.setattr(torch, "load", no_memory)
    with pytest.raises(CheckpointError, match=r"last\.pth: not enough memory to load it, or it is damaged\."):
        read_checkpoint(tmp_path / "last.pth")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>not found</html>", "not a PyTorch checkpoint: the file is a text that begins with '<html>not found"),
        (b"c = 1", "not a PyTorch checkpoint: the file is a text that begins with 'c = 1'. Get"),
        (b"", "not a PyTorch checkpoint: the file is empty. Get"),
        (b"\xff\xd8\xff\xe0", "not a PyTorch checkpoint: the file is something else. Get"),
        (b"\x80\x02a.", "truncated or damaged. Get"),
        (b"PK\x03\x04", "truncated or damaged (PytorchStreamReader failed reading zip archive: not a"),
    ],
)
def test_error_for_a_file_that_is_no_checkpoint_is_plain(tmp_path, content, message):
    path = tmp_path / "page.pth"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(f"page.pth: {message}")):
        read_checkpoint(path)


class _Harmful:
    def __reduce__(self):
        return os.mkdir, ("code_was_run",)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_code_is_refused_and_not_run(tmp_path, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pth"
    if zipped:
        torch.save({"model": {"w": torch.zeros(2)}, "x": _Harmful()}, path)
    else:
        path.write_bytes(pickle.dumps({"x": _Harmful()}, protocol=2))
    with pytest.raises(CheckpointError, match="refused, because it contains pickled code"):
        read_checkpoint(path)
    assert [file.name for file in tmp_path.iterdir()] == ["evil.pth"]


def test_argparse_namespace_of_official_training_checkpoints_is_read(tmp_path):
    import argparse

    torch.save({"model": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=1e-4)}, tmp_path / "official.pth")
    assert read_checkpoint(tmp_path / "official.pth")["args"].lr == 1e-4


def test_another_models_checkpoint_is_an_error_that_says_so():
    state = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).state_dict()
    with pytest.raises(CheckpointError, match=r"does not fit TinyDetector: 0 of the model's 6 (.|\n)*another model's"):
        load_weights(TinyDetector(), state)


def test_missing_and_unexpected_keys_are_an_error_by_default_and_reported_otherwise():
    model = TinyDetector()
    state = model.state_dict()
    state["extra.weight"] = state.pop("neck.bias")
    with pytest.raises(CheckpointError, match=r"missing \(1\): neck.bias\n.*unexpected \(1\): extra.weight"):
        load_weights(TinyDetector(), state)
    report = load_weights(TinyDetector(), state, strict=False)
    assert report.missing == ["neck.bias"] and report.unexpected == ["extra.weight"]


def test_a_wrong_shape_is_named_with_both_shapes():
    state = TinyDetector().state_dict()
    state["body.weight"] = torch.zeros(8, 5)
    with pytest.raises(CheckpointError, match=r"body.weight: checkpoint \(8, 5\), model \(8, 4\)"):
        load_weights(TinyDetector(), state, strict=False)


def test_wrapped_and_ddp_names_load():
    model = TinyDetector()
    state = {"model": {f"module.{key}": value for key, value in model.state_dict().items()}}
    other = TinyDetector()
    load_weights(other, state)
    assert torch.equal(other.body.weight, model.body.weight)


def test_other_classes_are_an_error_unless_a_new_head_is_asked_for(tmp_path):
    trained = TinyDetector(num_classes=5)
    model = TinyDetector(num_classes=3)
    fresh = model.classes.weight.clone()
    with pytest.raises(CheckpointError, match="class head is for other classes"):
        load_weights(model, trained.state_dict())
    report = load_weights(model, trained.state_dict(), new_class_head=True)
    assert report.reinitialized == ["classes.weight", "classes.bias"]
    assert "newly initialized: classes.weight" in str(report)
    assert torch.equal(model.classes.weight, fresh)
    assert torch.equal(model.body.weight, trained.body.weight)


def test_equally_many_but_other_classes_are_not_taken_for_the_same(tmp_path):
    save_checkpoint(tmp_path / "a.pth", {"model": TinyDetector().state_dict(), "classes": ["cat", "dog", "cow"]})
    with pytest.raises(CheckpointError, match="3 classes cat, dog, cow; model: 3 classes bus, car, van"):
        load_weights(TinyDetector(), tmp_path / "a.pth", classes=["bus", "car", "van"])
    with pytest.raises(CheckpointError, match=r"not trained on 1 class of the model, van \(checkpoint: 3 classes cat"):
        load_weights(TinyDetector(), tmp_path / "a.pth", classes=["dog", "cat", "van"])


@pytest.mark.parametrize(
    ("classes", "shown"), [(torch.tensor(3), r"tensor\(3\)"), (torch.zeros(2, 1), r"tensor\(\[\[0\.\], \[0\.\]\]\)")]
)
def test_classes_that_are_not_names_are_an_error(classes, shown, tmp_path):
    config = '{"model": {"type": "DETR", "tasks": [3]}}'
    state = {"model": TinyDetector().state_dict(), "classes": classes, "config": config}
    save_checkpoint(tmp_path / "a.pth", state)
    with pytest.raises(CheckpointError, match=rf"a\.pth: its classes are {shown}; expected a list of names"):
        load_weights(TinyDetector(), tmp_path / "a.pth", classes=["dog", "cat", "cow"], new_class_head=True)


def test_a_name_of_the_model_zoo_is_fetched_from_its_url(monkeypatch, tmp_path):
    model = TinyDetector()
    torch.save(model.state_dict(), tmp_path / "published.pth")
    asked = []

    def fetch(url, *, checksum, name):
        asked.append((url, checksum))
        return tmp_path / "published.pth"

    monkeypatch.setattr("vitkit.weights.published.fetch_file", fetch)
    other = TinyDetector()
    load_weights(other, "detr_r50")
    assert torch.equal(other.body.weight, model.body.weight)
    assert asked == [("https://dl.fbaipublicfiles.com/detr/detr-r50-e632da11.pth", "sha256:e632da11")]


def test_weights_that_are_not_finite_are_named(caplog):
    state = nn.Linear(2, 2).state_dict()
    state["weight"][0, 1] = float("nan")
    state["bias"][0] = float("inf")
    report = load_weights(nn.Linear(2, 2), state)
    assert report.not_finite == ["weight", "bias"] and "NaN or infinite: weight, bias" in str(report)
    assert "2 of 2 loaded entries contain NaN or infinity: weight, bias" in caplog.text


def test_infinity_in_a_buffer_is_allowed(caplog):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.full((2,), float("-inf")))

    assert not load_weights(Masked(), Masked().state_dict()).not_finite
    assert "infinity" not in caplog.text


def test_damage_that_torch_does_not_notice_is_an_error(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"model": {"w": torch.arange(1000.0)}}, path)
    data = bytearray(path.read_bytes())
    place = data.find(torch.arange(1000.0).numpy().tobytes()[400:440])
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged: the checksum of .*data/0 is wrong"):
        read_checkpoint(path)


@pytest.mark.parametrize("legacy", [False, True])
def test_other_entries_are_read_without_the_weights(tmp_path, legacy):
    path = tmp_path / "weights.pth"
    weights = torch.arange(1000.0)
    state = {"model": {"w": weights}, "config": "the config", "classes": ["cat"]}
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    metadata = read_metadata(path)
    assert (metadata["config"], metadata["classes"]) == ("the config", ["cat"])
    if legacy:
        return
    data = path.read_bytes()
    path.write_bytes(data.replace(weights.numpy().tobytes(), bytes(4000)))
    assert read_metadata(path)["config"] == "the config"  # it does not read the damaged weights
    path.write_bytes(data.replace(b"the config", b"the c0nfig"))
    with pytest.raises(CheckpointError, match="damaged .Bad CRC-32 for file '.*data.pkl'"):
        read_metadata(path)


def test_dtype_changes_are_not_silent():
    state = {**TinyDetector().state_dict(), "body.bias": torch.ones(8, dtype=torch.int64)}
    with pytest.raises(CheckpointError, match=r"body.bias contains torch.int64 .* the model's torch.float32"):
        load_weights(TinyDetector(), state)
    load_weights(
        TinyDetector(),
        {
            key: value.half() if value.is_floating_point() else value
            for key, value in state.items()
            if key != "body.bias"
        },
        strict=False,
    )


@pytest.mark.parametrize("name", ["a.pth", "a.npz"])
def test_archive_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(50 * 2**20))
    for read in (read_checkpoint, read_metadata) if name == "a.pth" else (read_checkpoint,):
        with pytest.raises(CheckpointError, match=f"{name}: damaged: .* bytes that claim to contain 52428800"):
            read(tmp_path / name)
