"""Published figures are measured as `vitkit test` does it, from a server, on data that are the published ones."""

import functools
import hashlib
import http.server
import json
import os
import re
import shutil
import signal
import threading
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers.processes import run_forked
from PIL import Image

import vitkit
from vitkit import model_zoo
from vitkit.apps.datasets.synthetic import write_shapes
from vitkit.apps.reproduction import measuring, read_record
from vitkit.apps.training.stored_predictions import PredictionFiles
from vitkit.errors import ConfigError, DataError
from vitkit.tools import reproduce
from vitkit.weights import download

NUM_IMAGES = 20
CONFIG = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    images = dict(type="CocoDetection", images="{root}/val2017")
    images["annotations"] = "{root}/annotations/instances_val2017.json"
    cfg["data"] = dict(root="data/coco", train=images, val=images, num_workers=0, val_images_per_gpu=2)
    cfg["train"].update(epochs=1, log_every=1)
    return cfg
"""
PANOPTIC = """
from vitkit.configs.quickstart.mask2former_panoptic import config as quickstart


def config():
    cfg = quickstart()
    images = dict(type="CocoPanoptic", images="{root}/val2017", maps="{root}/annotations/panoptic_val2017")
    images["annotations"] = "{root}/annotations/panoptic_val2017.json"
    cfg["data"] = dict(root="pan", train=images, val=images, num_workers=0, val_images_per_gpu=2)
    return cfg
"""
STUB = Path("served/stub.pth")
TRAINING = "{root}/annotations/instances_train2017.json"
ANNOTATIONS = Path("data/coco/annotations/instances_val2017.json")


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; /login/… leads to a page in place of a file, as Google Drive and Dropbox do."""

    def do_GET(self):
        if self.path.startswith("/login/"):
            self.send_response(302)
            self.send_header("Location", "/page.html")
            self.end_headers()
            return
        super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Return a folder with data/coco, a config, a zoo with a stub of a model, and its weights in a folder to serve."""
    folder = tmp_path_factory.mktemp("world")
    write_shapes(folder / "data/coco", num_train=1, num_val=NUM_IMAGES, image_size=64, max_objects=2, min_size=0.25)
    (folder / "stub.py").write_text(CONFIG)
    served = folder / "served"
    served.mkdir()
    (served / "page.html").write_text("<!doctype html><title>Sign in</title>")
    torch.save(vitkit.load("shapes_detr").model.state_dict(), served / "stub.pth")
    return folder


@pytest.fixture
def zoo(world, tmp_path, monkeypatch) -> str:
    """Stay in a copy of the world, whose index names a server's files; return the server's URL."""
    shutil.copytree(world, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_zoo, "FOLDER", tmp_path / "zoo")
    handler = functools.partial(_Handler, directory=str(tmp_path / "served"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    digest = hashlib.sha256(STUB.read_bytes()).hexdigest()
    content = json.loads(ANNOTATIONS.read_text())
    counts = {part: len(content[part]) for part in ("images", "annotations", "categories")}
    official = {**counts, "sha256": hashlib.sha256(ANNOTATIONS.read_bytes()).hexdigest()}
    other_year = {**counts, "images": NUM_IMAGES - 2, "annotations": None}
    Path("zoo").mkdir()
    write_index(stub=entry(f"{url}/stub.pth", checksum=f"sha256:{digest[:8]}"))
    write_zoo("trained", {})
    datasets = {
        "COCO 2017": {"url": "https://cocodataset.org/#download", "files": {ANNOTATIONS.name: official}},
        "COCO 2014": {"url": "https://cocodataset.org/#download", "files": {"instances_val2014.json": other_year}},
    }
    write_zoo("datasets", datasets)
    yield url
    server.shutdown()
    server.server_close()


def entry(url: str, **changes) -> dict:
    return {
        "config": "stub.py",
        "url": url,
        "checksum": "",
        "dataset": "COCO 2017",
        "published": {"box AP": 79.6, "AP50": 12.0, "mIoU, multi-scale and flip": 3.0},
        "published_in": "a paper",
        "parameters": 1000,
        **changes,
    }


def write_zoo(name: str, content: dict) -> None:
    Path("zoo", f"{name}.json").write_text(json.dumps(content))


def read_zoo(name: str) -> dict:
    return json.loads(Path("zoo", f"{name}.json").read_text())


def write_index(**entries) -> None:
    write_zoo("index", entries)


def run(*arguments: str) -> None:
    reproduce.main([*arguments, "--device", "cpu"])


def fails(*arguments: str) -> str:
    """Return the one line with which the tool ends."""
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert isinstance(ended.value.code, str) and "\n" not in ended.value.code.strip()
    return ended.value.code


def serve_other_weights(url: str) -> None:
    torch.manual_seed(1)
    weights = {name: x + 0.1 * torch.randn_like(x) if x.ndim > 1 else x for name, x in torch.load(STUB).items()}
    torch.save(weights, "served/other.pth")
    write_index(stub=entry(f"{url}/other.pth"))


def without_timing(path: str | Path) -> dict:
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    return {name: value for name, value in content.items() if name not in ("timing", "sum")}


def test_record_has_the_metrics_of_vitkit_test_beside_the_published_ones(zoo, capsys):
    run("stub")
    record = read_record("records/stub.json")
    metrics = vitkit.test("stub", device="cpu").metrics
    measured = {name: None if value == -1 else value for name, value in metrics.items()}
    assert record.metrics == measured and measured["bbox/AP"] > 0.4
    assert [(each.name, each.metric, each.published) for each in record.figures] == [
        ("box AP", "bbox/AP", 79.6),
        ("AP50", "bbox/AP50", 12.0),
    ]
    first = record.figures[0]
    assert first.measured == 100 * metrics["bbox/AP"] and first.low < first.measured < first.high
    assert first.difference == first.measured - 79.6 and first.agrees and not record.figures[1].agrees
    assert record.not_measured == ["mIoU, multi-scale and flip"]
    assert record.weights["source"] == f"{zoo}/stub.pth"
    assert record.weights["sha256"] == hashlib.sha256(STUB.read_bytes()).hexdigest()
    assert record.data["checked"] == "checksum" and record.data["name"] == "COCO 2017"
    digest = hashlib.sha256(ANNOTATIONS.read_bytes()).hexdigest()
    assert record.data["files"] == {"annotations/instances_val2017.json": digest}
    assert record.data["opened"]["images"] == NUM_IMAGES == record.num_samples == record.timing["samples"]
    assert record.command == "vitkit reproduce stub data.root=DIR" and torch.__version__.startswith(
        record.versions["torch"]
    )
    assert str(Path.cwd()) not in Path("records/stub.json").read_text()
    printed = capsys.readouterr().out
    assert "box AP 79.6: " in printed and "the record is records/stub.json" in printed
    assert "| `stub` | COCO 2017 val, 20 | box AP 79.6: " in Path("records/table.md").read_text()
    assert sorted(path.name for path in Path("records").iterdir()) == ["stub.json", "table.md"]


def reproduce_and_die(folder: str, after: int) -> None:
    """Reproduce in another process, which is killed after some batches."""
    os.chdir(folder)
    model_zoo.FOLDER = Path(folder, "zoo")
    write, numbers = PredictionFiles._write, count(1)

    def killed(files, content):
        if next(numbers) > after:
            os.write(files._file.fileno(), b"half of a prediction")
            os.kill(os.getpid(), signal.SIGKILL)
        write(files, content)

    PredictionFiles._write = killed
    run("stub")


def test_killed_measurement_goes_on_and_its_record_is_equal(zoo, capsys):
    run("stub", "--out", "whole")
    status, printed = run_forked(reproduce_and_die, str(Path.cwd()), 4)
    assert status == -signal.SIGKILL, printed
    assert [path.name for path in Path("records").iterdir()] == ["stub.stored_predictions"]
    run("stub")
    assert "resuming: 6 of 20 images are done" in capsys.readouterr().out
    assert without_timing("records/stub.json") == without_timing("whole/stub.json")
    assert read_record("records/stub.json").timing["samples"] == 14
    assert sorted(path.name for path in Path("records").iterdir()) == ["stub.json", "table.md"]


def test_predictions_of_other_weights_are_not_gone_on_with(zoo, capsys):
    run_forked(reproduce_and_die, str(Path.cwd()), 4)
    serve_other_weights(zoo)
    run("stub")
    assert "is of another evaluation, or damaged: it begins anew" in capsys.readouterr().err
    run("stub", "--out", "whole")
    assert without_timing("records/stub.json") == without_timing("whole/stub.json")


def test_subset_is_that_of_the_same_images_by_themselves(zoo):
    run("stub", "--images", "7")
    record = read_record("records/stub-7_images.json")
    assert (record.num_samples, record.subset) == (7, True) and record.command.endswith("--images 7 data.root=DIR")
    content = json.loads(ANNOTATIONS.read_text())
    dataset = vitkit.build_dataset(vitkit.load_config("stub.py")["data"]["val"], root="data/coco")
    chosen = {dataset.image_ids[k] for k in measuring_indices(7)}
    content["images"] = [image for image in content["images"] if image["id"] in chosen]
    content["annotations"] = [each for each in content["annotations"] if each["image_id"] in chosen]
    Path("seven.json").write_text(json.dumps(content))
    metrics = vitkit.test("stub", device="cpu", data=dict(val=dict(annotations="seven.json"))).metrics
    assert record.metrics == {name: None if value == -1 else pytest.approx(value) for name, value in metrics.items()}


def measuring_indices(number: int) -> list[int]:
    from vitkit.data.loading.splits import choose_fraction

    return choose_fraction(NUM_IMAGES, number / NUM_IMAGES).tolist()


def keep_part(zoo):
    for path in sorted(Path("data/coco/val2017").iterdir())[1:4]:
        path.unlink()


def take_another_year(zoo):
    content = json.loads(ANNOTATIONS.read_text())
    ANNOTATIONS.write_text(json.dumps({**content, "images": content["images"][:-2]}))
    datasets = read_zoo("datasets")
    datasets["COCO 2014"]["files"]["instances_val2014.json"]["annotations"] = len(content["annotations"])
    write_zoo("datasets", datasets)


def change_annotations(zoo):
    ANNOTATIONS.write_text(ANNOTATIONS.read_text().replace('"area": ', '"area":  '))


def damage_an_image(zoo):
    next(Path("data/coco/val2017").iterdir()).write_bytes(b"no image")


def resize_images(zoo):
    for path in Path("data/coco/val2017").iterdir():
        Image.open(path).convert("RGB").resize((48, 48)).save(path)


def lack_maps(zoo):
    """Let the figure be of panoptic data, of whose maps two are missing."""
    write_shapes(Path("pan"), num_train=1, num_val=8, image_size=96, max_objects=2, min_size=0.25)
    Path("pan.py").write_text(PANOPTIC)
    write_index(stub=entry(f"{zoo}/stub.pth", config="pan.py", dataset="drawn", published={"PQ": 80.0}))
    for path in sorted(Path("pan/annotations/panoptic_val2017").iterdir())[3:5]:
        path.unlink()


def change_checksum(zoo):
    write_index(stub=entry(f"{zoo}/stub.pth", checksum="sha256:00000000"))


def lead_to_a_page(zoo):
    write_index(stub=entry(f"{zoo}/login/stub.pth"))


def refuse_connections(zoo):
    write_index(stub=entry("http://127.0.0.1:9/stub.pth"))


def forget_data(zoo):
    shutil.rmtree("data")


def write_half_a_record(zoo):
    Path("records").mkdir()
    Path("records/stub.json").write_text("{}")


BAD = {
    keep_part: r"data/coco: 3 of 20 images are missing, such as 'data/coco/val2017/\w+.png': the folder is only a part",
    take_another_year: r"val2017.json: has 18 images, .* those of instances_val2014.json of COCO 2014; expected 20 "
    "images, .* those of COCO 2017. Get them from https://cocodataset.org",
    change_annotations: "has the counts of COCO 2017, but its sha256 begins .* content was changed",
    damage_an_image: r"val2017/\w+.png.*image",
    resize_images: r"image 'data/coco/val2017/\w+.png' is 48x48 pixels .width x height., and 64x64 in COCO 2017: it "
    "was changed. Get the images from https://cocodataset.org",
    lack_maps: r"pan: 2 of 8 maps are missing, such as 'pan/annotations/panoptic_val2017/\w+.png': the folder is only",
    change_checksum: "stub.pth.part: sha256 begins .*, expected 00000000: the file is damaged. It is removed",
    lead_to_a_page: "cannot download .*leads to a web page: open it in a browser, .* Put the file at .* or try again.$",
    refuse_connections: "cannot download http://127.0.0.1:9/stub.pth .*Connection refused.* Put the file at",
    forget_data: r"data.val: images: no folder 'data/coco/val2017'. Download the dataset",
    write_half_a_record: r"records/stub.json: there is a record already",
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_half_written(spoil, zoo):
    spoil(zoo)
    before = {path: path.read_bytes() for path in Path("records").glob("*")}
    assert re.search(BAD[spoil], fails("stub"))
    assert {path: path.read_bytes() for path in Path("records").glob("*")} == before
    cached = [path.name for path in Path("cache").rglob("*") if path.is_file()]
    assert not cached


def test_too_little_disk_is_said_before_the_download_begins(zoo, monkeypatch):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    assert re.search("it needs 0.00 GiB more, and .* has 0.00 free: free some space, or set TORCH_HOME", fails("stub"))
    assert not [path for path in Path("cache").rglob("*") if path.is_file()] and not Path("records").exists()


def test_a_record_edited_by_hand_stops_what_reads_it(zoo):
    run("stub", "--images", "5")
    path = Path("records/stub-5_images.json")
    path.write_text(path.read_text().replace('"published": 79.6', '"published": 60.5'))
    assert "edited by hand" in fails(str(path), "--out", "again")
    assert "edited by hand" in fails("stub")  # whose table would list it
    assert not Path("again").exists() and not Path("records/stub.json").exists()
    run("stub", "--images", "5", "--overwrite")
    assert read_record(path).figures[0].published == 79.6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["stub", "model.num_queries=5"],
            "model.num_queries=5: would measure another model. Only data.root and data.num_w",
        ),
        (["stbu"], "'stbu' has no figure to reproduce .*Did you mean 'stub'"),
        (["stub", "--images", "20"], "20 images: expected at least 1, fewer than the data have .20."),
        (["stub", "--split", "test"], "data.test: the config has none"),
        (["missing.json"], "missing.json"),
        (["unpublished"], "unpublished: none of its figures is published"),
        (
            ["stub", "--train"],
            "stub: its weights are published, and are measured without --train. .* vitkit train stub.py",
        ),
    ],
)
def test_wrong_arguments_are_errors_in_one_line(arguments, message, zoo):
    write_index(stub=entry(f"{zoo}/stub.pth"), unpublished=entry(f"{zoo}/stub.pth", published={}))
    assert re.search(message, fails(*arguments))


@pytest.mark.parametrize(
    "arguments",
    [[], ["stub", "--all"], ["stub", "--limit-hours", "1"], ["--all", "--train"], ["--all", "data.root=x"],
     ["--all", "--limit-hours", "0"], ["--all", "--limit-hours", "abc"], ["stub", "--datasets", "x"], ["stub", "other"],
     ["stub", "images=5"], ["stub.json", "--images", "5"], ["stub", "--verify", "x"]],
)  # fmt: skip
def test_options_that_exclude_each_other_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        reproduce.parse_args(arguments)
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and "error: " in printed and "_hours" not in printed


def test_all_walks_from_the_cheapest_past_failures_and_ends_with_the_time(zoo, monkeypatch, capsys):
    entries = {"large": 3000, "small": 1000, "lost": 2000, "unknown": None}
    entries = {
        name: entry(f"{zoo}/stub.pth", parameters=number, file=f"{name}.pth") for name, number in entries.items()
    }
    del entries["unknown"]["parameters"]
    entries["lost"]["url"] = f"{zoo}/lost.pth"
    write_index(**entries)
    assert [stated.name for stated in measuring.by_cost()] == ["small", "lost", "large", "unknown"]
    assert "1 model could not be measured" in fails("--all", "--images", "4")
    printed = capsys.readouterr()
    order = re.findall(r"the record is records/(\w+)-4_images", printed.out)
    assert order == ["small", "large", "unknown"]
    assert re.search(r"^lost: .*cannot download .*404", printed.err, re.M)
    Path("records/large-4_images.json").unlink()
    write_index(**{name: each for name, each in entries.items() if name != "lost"})
    run("--all", "--images", "4")  # those with records are not measured again
    assert re.findall(r"the record is records/(\w+)-4_images", capsys.readouterr().out) == ["large"]


@pytest.mark.parametrize(
    "arguments", [["stub", "--out", "stub.py/r"], ["stub", "--out", "/proc/r"], ["--all", "--out", "stub.py/r"]]
)
def test_a_folder_that_cannot_be_written_is_said_before_the_download(arguments, zoo):
    assert re.search(f"'{arguments[-1]}' cannot be written .*choose another --out", fails(*arguments))
    assert not [path for path in Path("cache").rglob("*") if path.is_file()]


def test_a_damaged_record_stops_the_walk_before_it_begins(zoo, capsys):
    write_index(stub=entry(f"{zoo}/stub.pth"), second=entry(f"{zoo}/stub.pth", parameters=2000))
    Path("records").mkdir()
    Path("records/package.json").write_text("{}")
    assert re.fullmatch(
        "error: records/package.json: is not a record of form 1. Remove it, or choose another --out.",
        fails("--all", "--images", "3"),
    )
    assert not capsys.readouterr().err and [path.name for path in Path("records").iterdir()] == ["package.json"]


def test_all_ends_in_the_middle_of_a_model_and_goes_on_with_it(zoo, monkeypatch, capsys):
    seconds = count()
    with monkeypatch.context() as patch:
        patch.setattr(measuring.time, "monotonic", lambda: next(seconds))
        run("--all", "--limit-hours", str(20 / 3600))  # by a clock that advances a second at each look
    assert [path.name for path in Path("records").iterdir()] == ["stub.stored_predictions"]
    run("--all")
    assert "images are done" in capsys.readouterr().out and Path("records/stub.json").is_file()


def test_a_record_is_repeated_from_its_file(zoo, capsys):
    run("stub", "--images", "6")
    run("records/stub-6_images.json", "--out", "again", "data.root=data/coco")
    assert "repeats records/stub-6_images.json: 2 figures in the interval" in capsys.readouterr().out
    assert without_timing("again/stub-6_images.json") == without_timing("records/stub-6_images.json")
    serve_other_weights(zoo)
    assert "records/stub-6_images.json: not repeated: " in fails("records/stub-6_images.json", "--out", "third")


def test_weights_that_are_not_published_are_trained_first_and_the_record_says_so(zoo, monkeypatch):
    figures = {"bbox/AP": 0.001, "bbox/AP50": 0.9}
    trained = {"config": "stub.py", "dataset": "drawn", "measured": figures, "processor_minutes": 3.5}
    trained["splits"] = {"test": {"images": "{root}/train2017", "annotations": TRAINING}}
    write_zoo("trained", {"own/stub": trained, "foreign": {**trained, "requires": "model.backbone.pretrained"}})
    assert (
        "own/stub: its weights are not published. vitkit reproduce own/stub --train trains them, 3.5 minutes of"
        in fails("own/stub")
    )
    assert "from weights of another project: give model.backbone.pretrained=FILE" in fails("foreign", "--train")
    run("own/stub", "--train")
    record = read_record("records/own-stub.json")
    assert record.weights["source"] == "vitkit train stub.py data.root=DIR"
    assert record.weights["data"]["split"] == "train" and record.weights["data"]["counts"]["images"] == NUM_IMAGES
    assert record.weights["data"]["endings"] == {".png": NUM_IMAGES}
    assert record.command == "vitkit reproduce own/stub --train data.root=DIR"
    best = Path("records/own-stub.run/best.pth")
    assert record.weights["sha256"] == hashlib.sha256(best.read_bytes()).hexdigest()
    assert [figure.published for figure in record.figures] == [0.001, 0.9]
    assert record.metrics["bbox/AP"] == pytest.approx(
        vitkit.test("records/own-stub.run", device="cpu").metrics["bbox/AP"]
    )
    # The same weights, on data for which no figure is stated.
    run("own/stub", "--train", "--split", "test", "data.num_workers=1")
    test = read_record("records/own-stub-test.json")
    assert test.command == "vitkit reproduce own/stub --train --split test data.root=DIR"
    assert test.weights == record.weights and test.num_samples == 1
    assert [(each.published, each.difference, each.agrees) for each in test.figures] == [(None, None, None)] * 2
    assert "| `own/stub` | drawn test, 1 | bbox/AP: " in test.line() and "| none published |" in test.line()
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "train", Mock(side_effect=ConfigError("cannot go on")))
        assert "cannot go on" in fails("own/stub", "--train", "--overwrite")
    assert best.is_file()  # a run that cannot go on is not thrown away


def test_a_run_with_other_settings_is_not_taken_for_that_of_the_command(zoo):
    trained = {"config": "stub.py", "dataset": "drawn", "measured": {"bbox/AP": 0.001}, "processor_minutes": 3.5}
    write_zoo("trained", {"foreign": {**trained, "requires": "optimizer.lr"}, "own": trained})
    run("foreign", "--train", "optimizer.lr=0.001")
    record = read_record("records/foreign.json")
    assert record.weights["source"] == "vitkit train stub.py optimizer.lr=0.001 data.root=DIR"
    message = "records/foreign.run: was trained with optimizer.lr=0.001, not 1e-07. Choose another --out, or remove it."
    assert message in fails("foreign", "--train", "optimizer.lr=0.0000001", "--overwrite")
    assert read_record("records/foreign.json") == record
    shutil.copytree("data/coco", "data/other")
    run("own", "--train")
    assert re.search(
        "own.run: was trained with data.root=/.*/data/coco, not /.*/data/other. Choose another --out",
        fails("own", "--train", "data.root=data/other", "--overwrite"),
    )


def test_weights_that_a_run_starts_from_are_recorded_by_their_checksum(zoo):
    stated = {"config": "stub.py", "dataset": "drawn", "requires": "model.backbone.pretrained"}
    setting = f"model.backbone.pretrained={STUB}"
    origin = measuring._origin(measuring.Stated("foreign", stated, True), vitkit.load_config("stub.py"), [setting])
    assert origin["source"] == "vitkit train stub.py model.backbone.pretrained=FILE data.root=DIR"
    assert origin["start_sha256"] == hashlib.sha256(STUB.read_bytes()).hexdigest()


def test_the_command_of_a_record_names_another_split_than_that_of_the_figure():
    stated = measuring.Stated("own", {"config": "stub.py", "split": "test"}, True)
    commands = [measuring.command_of(stated, split, None, None) for split in ("test", "val")]
    assert commands == ["vitkit reproduce own --train", "vitkit reproduce own --train --split val"]


def test_python_measures_as_the_command_does(zoo):
    record = vitkit.reproduce("stub", images=5, device="cpu", data=dict(root="data/coco"))
    assert record == read_record("records/stub-5_images.json") and "box AP 79.6: " in repr(record)
    with pytest.raises(ConfigError, match="there is a record already"):
        vitkit.reproduce("stub", images=5, device="cpu")
    assert vitkit.reproduce("stub", images=5, device="cpu", overwrite=True).metrics == record.metrics


def test_checks_of_data_are_errors_of_data(zoo):
    keep_part(zoo)
    with pytest.raises(DataError, match="3 of 20 images are missing"):
        vitkit.reproduce("stub", device="cpu")
