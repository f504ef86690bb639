"""The records of this project: their form and sums, and that they and the documents state the same figures."""

import re
from pathlib import Path

import pytest

from vitkit import load_config, model_zoo
from vitkit.apps.reproduction import read_record
from vitkit.apps.reproduction.data_checks import known_data
from vitkit.apps.reproduction.measuring import by_cost, command_of, find_stated
from vitkit.apps.reproduction.records import TABLE, format_table, read_records
from vitkit.config import find_config

ZOO = Path(__file__).resolve().parents[2] / "model_zoo"
RECORDS = sorted((ZOO / "records").glob("*.json"))
if not RECORDS:
    pytest.skip("an installed package has no records", allow_module_level=True)
MEASUREMENTS = (ZOO / "measurements.md").read_text(encoding="utf-8").partition("# Measured here")[2]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_record_has_its_sum_and_its_figures_are_those_that_are_stated(path):
    record = read_record(path)
    stated = find_stated(record.name)
    is_stated = record.data["split"] == stated.split  # for other splits there is no figure to agree with
    agrees = True if is_stated else None
    assert record.figures and ("published" in stated.entry or all(each.agrees == agrees for each in record.figures))
    expected = {name: value if is_stated else None for name, value in stated.figures.items()}
    assert {figure.name: figure.published for figure in record.figures} == expected
    images = record.num_samples if record.subset else None
    root = None if "data.root=DIR" not in record.command else "DIR"
    assert record.command == command_of(stated, record.data["split"], images, root)
    if not stated.is_trained_first and model_zoo.is_packaged(record.name):
        digest = stated.entry["checksum"].removeprefix("sha256:")
        assert record.weights["sha256"].startswith(digest) and record.weights["source"] == stated.entry["url"]


def test_every_packaged_model_has_a_record_and_the_table_lists_all():
    packaged = {name for name in model_zoo.index() if model_zoo.is_packaged(name)}
    records = read_records(ZOO / "records")
    assert packaged <= {record.name for record in records.values()}
    text = (ZOO / "records" / TABLE).read_text(encoding="utf-8")
    assert text == format_table(records.items()), "run python model_zoo/write_table.py"


@pytest.mark.parametrize("name", model_zoo.trained())
def test_figures_of_trained_weights_are_those_of_the_measurements(name):
    entry = model_zoo.trained()[name]
    config = load_config(entry["config"], entry.get("overrides", ()))
    assert config["data"].get(entry.get("split", "val")) and entry["processor_minutes"] > 0
    (row,) = re.findall(rf"^\| `{name}`.*|^\| `[^|]*, `{name}`.*", MEASUREMENTS, re.M)
    stated = {float(number) for number in re.findall(r"\d+\.\d+", row)}
    notes = [find_config(entry["config"]).file.read_text(encoding="utf-8")]
    stated |= {float(number) for note in notes for number in re.findall(r"\d+\.\d+", note)}
    assert {float(value) for value in entry["measured"].values()} <= stated, row


def test_known_data_have_counts_and_whole_checksums():
    for name, data in known_data().items():
        assert data["url"].startswith("http"), name
        for known in [*data.get("files", {}).values(), *(data[s] for s in ("train", "val", "test") if s in data)]:
            counts = {key: value for key, value in known.items() if key != "sha256"}
            assert counts and all(type(value) is int and value > 0 for value in counts.values())
            assert re.fullmatch("[0-9a-f]{64}", known.get("sha256", "0" * 64))


def test_the_index_is_walked_from_small_to_large():
    names = [stated.name for stated in by_cost()]
    assert {*names} == {name for name, entry in model_zoo.index().items() if entry.get("published", 1)}
    assert names.index("numbers_translator") < names.index("dfine_n_coco") < names.index("dfine_x_coco")
    assert names.index("detr_r50") < names.index("mask2former_swin_large_coco_panoptic")
