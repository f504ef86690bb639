"""Datasets read the same from a pack as from its files, and train the same, also after a failure and a restart."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.located_texts import grounding_line, write_images, write_odvg
from helpers.range_server import serve
from helpers.real_runs import finish, start
from helpers.toy_training import run
from helpers.weights import assert_same_weights

from vitkit.apps.datasets.packing import write_pack
from vitkit.apps.datasets.synthetic import write_shapes
from vitkit.apps.datasets.writing import WRITERS
from vitkit.config.paths import make_data_paths_absolute
from vitkit.data.formats import read_annotations
from vitkit.data.loading import samplers
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import build_dataset
from vitkit.errors import DataError
from vitkit.io import image_files, packs, remote_files
from vitkit.io.packs import mount
from vitkit.structures import Batch
from vitkit.weights import read_checkpoint

TRAIN = dict(type="CocoDetection", images="{root}/train2017", annotations="{root}/annotations/instances_train2017.json")
SPECS = {
    "detection": TRAIN | dict(masks=True),
    "panoptic": dict(
        type="CocoPanoptic",
        images="{root}/train2017",
        maps="{root}/annotations/panoptic_train2017",
        annotations="{root}/annotations/panoptic_train2017.json",
    ),
    "semantic": dict(
        type="SemanticFolder",
        images="{root}/train2017",
        labels="{root}/annotations/semantic_train2017",
        classes=list("abcdefghij"),
        image_suffix=None,
    ),
    "classification": dict(type="ImageFolder", folder="{root}/folders"),
    "captions": dict(
        type="CocoCaptions",
        images="{root}/train2017",
        annotations="{root}/annotations/captions_train2017.json",
        min_count=1,
    ),
    "grounding": dict(type="GroundingDataset", images="{root}/grounded", annotations="{root}/grounded.jsonl"),
    "mixed": dict(type="MixedDataset", datasets=[TRAIN, TRAIN]),
    "yolo": dict(type="CocoDetection", images=None, annotations="{root}/yolo"),
    "voc": dict(type="CocoDetection", images=None, annotations="{root}/voc"),
    "coco beside its images": dict(type="CocoDetection", images=None, annotations="{root}/coco/labels.json"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(remote_files, "FIRST_WAIT", 0.01)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_shapes(folder, num_train=8, num_val=2, image_size=32)
    for name in ("yes", "no", "never"):
        (folder / "folders" / name).mkdir(parents=True)
    for number, image in enumerate(sorted((folder / "train2017").iterdir())):
        (folder / "folders" / ("yes" if number % 3 else "no") / image.name).write_bytes(image.read_bytes())
    write_images(folder / "grounded", "a.jpg", "b.jpg")
    write_odvg(folder / "grounded.jsonl", grounding_line("a.jpg"), grounding_line("b.jpg"))
    for name in ("yolo", "voc"):
        annotated = read_annotations(folder / "annotations/instances_train2017.json", folder / "train2017")
        WRITERS[name](annotated, folder / name, {})
    (folder / "coco").mkdir()
    for image in (folder / "train2017").iterdir():
        (folder / "coco" / image.name).write_bytes(image.read_bytes())
    (folder / "coco/labels.json").write_bytes((folder / "annotations/instances_train2017.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def pack(data, tmp_path_factory) -> Path:
    write_pack(data, tmp_path_factory.mktemp("served") / "pack", shard_bytes=24 << 10)
    return tmp_path_factory.getbasetemp() / "served0/pack"


@pytest.fixture
def server(pack):
    pytest.importorskip("aiohttp")
    with serve(pack.parent) as served:
        yield served


def parts(value):
    """Yield the tensors and values of a sample."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from parts(inner)
    if not isinstance(value, dict | list | tuple):
        yield np.asarray(value)


@pytest.mark.parametrize("name", SPECS)
def test_samples_are_those_of_the_files(data, pack, name):
    files, packed = (build_dataset(SPECS[name], str(root)) for root in (data, pack))
    assert len(files) == len(packed) and list(files.classes or ()) == list(packed.classes or ())
    for index in range(len(files)):
        ours, theirs = (list(parts(dict(dataset[index, 3]))) for dataset in (packed, files))
        assert len(ours) == len(theirs) > 2
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs))
    assert files.image_blocks() is None and len(packed.image_blocks()) == len(packed)


def test_a_loader_with_workers_reads_a_pack_on_a_server(data, server):
    settings = [DataSettings(root=root, train=TRAIN, num_workers=1) for root in (str(data), f"{server.url}/pack")]
    expected, ours = (list(s.train_loader(s.dataset("train"), 0)) for s in settings)
    assert all(torch.equal(a.inputs["images"], b.inputs["images"]) for a, b in zip(ours, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_inherit_nothing_read_a_pack(server, method):
    settings = DataSettings(root=f"{server.url}/pack", train=TRAIN, num_workers=1, start_workers=method)
    assert len(list(settings.train_loader(settings.dataset("train"), 0))) == 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_unreadable_shard_ends_loading_in_one_line_or_is_skipped(server, num_workers, monkeypatch, caplog):
    monkeypatch.setenv("VITKIT_CACHE_GB", "0")
    # A server of forks that runs already has the variables of another test.
    start = "fork" if num_workers else None
    settings = DataSettings(root=f"{server.url}/pack", train=TRAIN, num_workers=num_workers, start_workers=start)
    dataset = settings.dataset("train")
    found, number = image_files._find_packed(dataset.image_path(3))
    shard = found.shards[int(found.members[number]["shard"])]["name"]
    server.faults[f"pack/{shard}"] = [500] * 1000
    with pytest.raises(DataError, match=rf"'{server.url}/pack/{shard}' .* cannot be read in 5 attempts: 500, message"):
        list(settings.train_loader(dataset, 0))
    settings.on_error = "skip"
    loader = settings.train_loader(dataset, 0)
    assert len(list(loader)) == 4 and loader.num_skipped > 0
    assert "Another sample takes its place (data.on_error=skip)" in caplog.text


def test_an_address_stays_as_it_is_when_paths_become_absolute(server):
    cfg = {"data": {"root": f"{server.url}/pack", "train": TRAIN, "val": TRAIN | dict(images="here")}}
    make_data_paths_absolute(cfg)
    assert cfg["data"]["root"] == f"{server.url}/pack" and cfg["data"]["train"] == TRAIN
    assert cfg["data"]["val"]["images"] == str(Path("here").absolute())


def test_an_error_names_the_dataset_that_has_no_pack(server):
    with pytest.raises(DataError, match=rf"data\.train: no '{server.url}/none/pack\.json'"):
        DataSettings(root=f"{server.url}/none", train=TRAIN).dataset("train")


class Regressed:
    """Batches of images as those of a regression: four colors of each, and their sum."""

    num_skipped = num_padded = 0

    def __init__(self, loader):
        self.loader = loader
        self.set_position = loader.set_position

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            colors = batch.inputs["images"][:, :, 5:9, 7].float().mean(dim=1) / 255
            yield Batch({"images": colors}, [{"value": value} for value in colors.sum(dim=1)])


def test_training_resumed_after_a_failure_of_the_server_equals_one_without(server, tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(samplers, "WINDOW_BLOCKS", 3)
    monkeypatch.setenv("VITKIT_CACHE_GB", "0")
    settings = DataSettings(root=f"{server.url}/pack", train=TRAIN, num_workers=0)

    def train(name, **options):
        loader = Regressed(settings.train_loader(settings.dataset("train"), seed=1))
        assert len(loader) == 4
        return run(tmp_path / name, loader=loader, batches_per_epoch=4, save_every_steps=1, log_every=1, **options)[0]

    whole = train("whole")
    answer = server.answer
    fail_after(server, monkeypatch, tmp_path / "parts/log.jsonl", step=6)
    with pytest.raises(DataError, match=r"'http.*/shard-0000\d\.tar' .* cannot be read in 5 attempts"):
        train("parts")
    assert read_checkpoint(tmp_path / "parts/last.pth")["progress"]["step"] == 6
    monkeypatch.setattr(server, "answer", answer)
    resumed = train("parts", resume=tmp_path / "parts/last.pth")
    assert_same_weights(resumed, whole)


def fail_after(server, monkeypatch, log: Path, *, step: int) -> None:
    """Let a server fail to send shards once a run's log has a step."""
    answer = server.answer

    def answer_until(handler, *, with_body):
        if "shard" in handler.path and log.exists() and f'"step": {step}' in log.read_text():
            handler.send_error(500)
        else:
            answer(handler, with_body=with_body)

    monkeypatch.setattr(server, "answer", answer_until)


CONFIG = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"]["neck"]["out_channels"] = 16
    cfg["model"]["head"].update(d_model=16, num_heads=2, d_ffn=32, num_encoder_layers=1, num_decoder_layers=1)
    annotations = "{root}/annotations/instances_train2017.json"
    data = dict(type="CocoDetection", images="{root}/train2017", annotations=annotations)
    flips = dict(type="ComposedTransforms", transforms=[dict(type="D4")])
    cfg["data"] = dict(train=data | dict(transforms=flips), val=data | dict(first=1), images_per_gpu=2, num_workers=0)
    cfg["schedule"] = dict(type="MultiStepLR", drop_at_epochs=[100])
    cfg["train"] = dict(epochs=2, log_every=1, save_every_steps=1, eval_every=2)
    return cfg
"""


@pytest.mark.slow
def test_a_run_whose_server_failed_ends_as_one_without_failures(server, tmp_path, monkeypatch):
    train = pytest.importorskip("vitkit.tools.train", reason="vitkit is not installed (pip install -e .)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITKIT_CACHE_GB", "0")
    monkeypatch.setattr(packs, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(samplers, "WINDOW_BLOCKS", 3)
    logger = logging.getLogger("vitkit")
    monkeypatch.setattr(logger, "handlers", [])
    Path("tiny.py").write_text(CONFIG)

    def train_by(*argv):
        train.main([*argv, "--device", "cpu"])

    train_by("tiny.py", "--run-dir", "whole", f"data.root={server.url}/pack")
    answer = server.answer
    fail_after(server, monkeypatch, Path("parts/log.jsonl"), step=5)
    with pytest.raises(SystemExit, match=r"error: 'http.*/shard-0000\d\.tar' .* cannot be read in 5 attempts"):
        train_by("tiny.py", "--run-dir", "parts", f"data.root={server.url}/pack")
    assert 4 < read_checkpoint("parts/last.pth")["progress"]["step"] < 8  # of four an epoch
    monkeypatch.setattr(server, "answer", answer)
    train_by("--resume", "parts")
    whole, resumed = (read_checkpoint(f"{name}/last.pth") for name in ("whole", "parts"))
    assert resumed["progress"] == whole["progress"] and losses("parts") == losses("whole")
    assert all(value.equal(resumed["model"][name]) for name, value in whole["model"].items())


@pytest.mark.slow
def test_an_image_that_one_rank_cannot_read_ends_both_with_a_line_each(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pack(data, tmp_path / "damaged")
    root = mount(str(tmp_path / "damaged"))
    image = next(Path(data, "train2017").iterdir()).name
    found, number = image_files._find_packed(Path(root, "train2017", image))
    with (tmp_path / "damaged/shard-00000.tar").open("r+b") as shard:
        shard.seek(int(found.members[number]["offset"]) + 40)
        shard.write(b"damage")
    Path("tiny.py").write_text(CONFIG)
    assert finish(start("tiny.py", "--run-dir", "run", "data.root=damaged", ranks=2)) == [1, 1]
    errors = [line for line in Path("output.txt").read_text().splitlines() if line.startswith("error")]
    assert len(errors) == 2
    assert sum(f"image 'train2017/{image}', have another checksum than the index says" in line for line in errors) == 1
    assert sum("another rank has ended, and this one with it; see that one's error." in line for line in errors) == 1


def losses(run: str) -> dict[int, float]:
    records = map(json.loads, Path(run, "log.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
