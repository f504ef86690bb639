"""Train detectors on every dataset of a folder by one protocol, and score each of them once on its test images.

The folder is RF100-VL (Robicheaux et al. 2025, https://arxiv.org/abs/2505.20612), or has other datasets as Roboflow
exports them: NAME/train, NAME/valid and NAME/test, each with its images and _annotations.coco.json. The protocol is the
same for all of them: the epochs, no augmentation or size chosen for a dataset, the checkpoint with the highest AP on
valid, and at most 500 detections of a class in an image; training never reads test. A model has the size of images
that its config says. Intervals are those of 95 %, by resampling the test images.

Each model has a record for each dataset, which is not made again, and a run that was killed is resumed. After each run
rf100.md, rf100.json and rf100.png are written anew, with all records in the folder: another command may add a model, or
train on other --datasets at the same time.

Examples:
    python tools/benchmark/rf100.py data/rf100-vl --model "rf_detr_n_coco --init rf_detr_n_coco" \\
        --model "rf_detr_s_coco --init rf_detr_s_coco" --device cuda
    python tools/benchmark/rf100.py my_datasets --model start/detection:pretrained=False --epochs 20
"""

import argparse
import copy
import hashlib
import itertools
import json
import math
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitkit.apps.inference import find_trained
from vitkit.apps.report.intervals import bootstrap_weights, estimate
from vitkit.apps.starter.child_runs import Child
from vitkit.apps.training.results import score_results
from vitkit.apps.visualization.curves import read_log
from vitkit.config import load_config
from vitkit.data.datasets.coco import CocoDetection
from vitkit.engine.run_folder import RECORD_NAME
from vitkit.errors import ConfigError, DataError, VitkitError
from vitkit.io.folders import subfolders
from vitkit.io.json_files import read_json
from vitkit.io.output import write_text
from vitkit.logging import LOG_NAME
from vitkit.text_format import pluralize
from vitkit.tools.benchmark.rf100_page import METRICS, Record, plot_records, summarize, table
from vitkit.tools.common import add_device, errors_in_one_line, positive
from vitkit.weights.download import file_digest
from vitkit.weights.locate import LAST_NAME, RUN_CONFIG, RUN_WEIGHTS

SPLITS = {"train": "trained on", "valid": "what the checkpoint is chosen by", "test": "scored"}
"""Folder of a dataset -> what its images are for."""
ANNOTATIONS = "_annotations.coco.json"
MAX_DETS = 500
NUM_EVALUATIONS = 10
"""How often a run is evaluated on valid at most, evenly over its epochs, and after the last one."""
_PROTOCOL = "protocol.json"
FIELDS = {
    *("model", "size", "dataset", *METRICS, "valid_AP", "images", "classes", "epochs", "steps", "minutes"),
    *("processor_minutes", "command", "versions", "device", "threads", "annotations", "weights", "config", "protocol"),
}
"""The fields of a record; those that are written today also have `model_sha256`, see `Model`."""


class Model(NamedTuple):
    """A model that is trained on each dataset."""

    size: str
    """The size of its images in evaluation, in words."""
    digest: str
    """SHA-256 of its config without the data's paths, and of a file of weights that it starts from."""


class OwnSet(NamedTuple):
    """A dataset that can be trained on."""

    name: str
    num_images: dict[str, int]
    """Folder -> number of images."""
    num_classes: int
    """The number of classes with an object, without Roboflow's supercategory, which has none."""
    annotations: dict[str, str]
    """Folder -> checksum of its annotations, SHA-256."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the datasets")
    text = "a config with overrides and --init, as `vitkit train` takes them, in quotes; may be repeated"
    parser.add_argument("--model", dest="models", action="append", required=True, metavar="WORDS", help=text)
    parser.add_argument("--datasets", nargs="+", metavar="NAME", help="only these datasets (default: all)")
    parser.add_argument("--epochs", type=positive, default=100, metavar="N", help="epochs of each run (default: 100)")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="seed of each run (default: 42)")
    text = "folder of the records, runs, table and plot (default: runs/rf100)"
    parser.add_argument("--out", type=Path, default=Path("runs/rf100"), help=text)
    add_device(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    with errors_in_one_line():
        return run_all(args)


def run_all(args: argparse.Namespace) -> int:
    """Train and score what has no record yet, and write the page after each run; return the exit status."""
    names = dataset_names(args.folder, args.datasets or ())
    models = {words: check_model(words) for words in dict.fromkeys(args.models)}
    protocol = dict(
        epochs=args.epochs,
        seed=args.seed,
        checkpoint=f"the highest AP on valid, of {math.ceil(args.epochs / eval_every(args.epochs))} evaluations",
        test="once",
        max_dets=MAX_DETS,
    )
    keep_protocol(args.out / _PROTOCOL, protocol)
    failures: dict[str, str] = {}

    def fail(what: str, error: VitkitError) -> None:
        failures[what] = str(error)
        print(f"failed    {what}: {error}", file=sys.stderr, flush=True)

    for record in read_records(args.out, protocol):  # before any training: what is wrong should be known today
        refuse_other_model(record, models)
    datasets = []
    for name in names:
        try:
            datasets.append(read_dataset(args.folder / name))
        except VitkitError as error:
            fail(name, error)
    for dataset, (words, model) in itertools.product(datasets, models.items()):
        try:
            record = next((r for r in read_records(args.out, protocol) if _key(r) == (words, dataset.name)), None)
            if record is None:
                print(f"training  {dataset.name}, {words}", flush=True)
                record = train_and_score(args, words, dataset, model.digest)
                record |= dict(protocol=protocol, size=model.size, model_sha256=model.digest)
                write_text(record_path(args.out, words, dataset.name), json.dumps(record, indent=1) + "\n")
            refuse_other_data(record, dataset)
            print(f"scored    {dataset.name}, {words}: {in_words(record)}", flush=True)
        except VitkitError as error:
            fail(f"{dataset.name}, {words}", error)
        write_page(args.out, protocol, read_records(args.out, protocol), len(subfolders(args.folder)), failures)
    if failures:
        print(f"{pluralize(len(failures), 'failures')}, see above; the same command tries again", file=sys.stderr)
    return 1 if failures else 0


def dataset_names(folder: Path, chosen: Sequence[str]) -> list[str]:
    """Return the names of the datasets in a folder, or check those that are chosen.

    Raises:
        DataError: there is no such folder or dataset, or the folder is a dataset itself.
    """
    if not folder.is_dir():
        raise DataError(f"no folder '{folder}'. Give the folder that contains the datasets.")
    if (folder / "train" / ANNOTATIONS).is_file():
        raise DataError(
            f"'{folder}' is a dataset itself. Give the folder that contains it: '{folder.resolve().parent}'."
        )
    names = subfolders(folder)
    if not names:
        raise DataError(
            f"'{folder}' contains no folders. Expected one for each dataset, with train/{ANNOTATIONS}, valid and test."
        )
    if unknown := [name for name in chosen if name not in names]:
        raise DataError(f"'{folder}' has no dataset {unknown[0]!r}, only {', '.join(names)}.")
    return [name for name in names if name in chosen or not chosen]


def eval_every(epochs: int) -> int:
    """Return after how many epochs of a run it is evaluated each time."""
    return math.ceil(epochs / NUM_EVALUATIONS)


def check_model(words: str) -> Model:
    """Check the words after `vitkit train`, and describe the model that they train.

    Raises:
        ConfigError: they are not a detector's config with overrides and weights, or set what the protocol does.
    """
    config, *rest = shlex.split(words) or [""]
    if config.startswith("-"):
        raise ConfigError(f"--model {words!r}: expected a config first, such as rf_detr_n_coco.")
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    of_protocol = ("train.epochs=", "train.seed=", "train.eval_every=", "train.best_metric=", "evaluator", "data.test")
    set_here = [override for override in overrides if override.startswith((*of_protocol, "data.root="))]
    if set_here or "--run-dir" in rest or "--resume" in rest:
        what = set_here[0] if set_here else "--run-dir or --resume"
        raise ConfigError(f"--model {words!r}: {what} is the protocol's. Leave it out; --epochs and --seed set these.")
    cfg = load_config(config, overrides)
    if cfg["evaluator"]["type"] != "CocoEvaluator":
        raise ConfigError(f"--model {words!r}: has the {cfg['evaluator']['type']}; expected a detector of boxes.")
    resize = cfg["data"]["val"].get("transforms") or {}
    size = ", ".join(f"{key} {resize[key]}" for key in ("size", "short_side", "max_size") if resize.get(key))
    return Model(size, _model_digest(cfg, rest))


def _model_digest(cfg: Mapping[str, Any], words: Sequence[str]) -> str:
    """Return the checksum of a config without the data's paths, and of files of weights among the words after it."""
    cfg = copy.deepcopy(dict(cfg))
    cfg["data"].pop("root", None)
    for split in ("train", "val", "test"):
        for key in ("images", "annotations"):
            (cfg["data"].get(split) or {}).pop(key, None)
    digests = [hashlib.sha256(json.dumps(cfg, sort_keys=True).encode()).hexdigest()]
    for path in (Path(word.rpartition("=")[2]) for word in words):
        files = [file for file in (path, *(path / name for name in RUN_WEIGHTS)) if file.is_file()]
        digests += [file_digest(file, "sha256") for file in files[:1]]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def keep_protocol(path: Path, protocol: Mapping[str, Any]) -> None:
    """Write the protocol of a folder, or compare it with the one that the folder has; raises ConfigError."""
    if path.is_file():
        refuse_other_protocol(path, read_json(path, key="protocol"), protocol)
    else:
        write_text(path, json.dumps(protocol, indent=1) + "\n")


def refuse_other_protocol(path: Path, found: Any, protocol: Mapping[str, Any]) -> None:
    if found != protocol:
        found = found if isinstance(found, dict) else {}
        key = next((key for key in protocol if found.get(key) != protocol[key]), "its content")
        raise ConfigError(
            f"'{path}' is of another protocol: {key} {found.get(key)!r}, not {protocol.get(key)!r}. Repeat the command "
            "that wrote it, or give another folder as --out: figures of two protocols are not comparable."
        )


def read_dataset(folder: Path) -> OwnSet:
    """Read and check the annotations of all splits of a dataset.

    Raises:
        DataError: a split is missing, has no objects, or cannot be read.
    """
    counts, classes, digests = {}, set(), {}
    for name, use in SPLITS.items():
        path = folder / name / ANNOTATIONS
        if not path.is_file():
            raise DataError(
                f"no file '{path}', the images of which are {use}. Export the dataset with train, valid and test as "
                "'COCO', or divide it: vitkit data split."
            )
        try:
            data = CocoDetection(path.parent, path, bad_boxes="drop")
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        if not len(data.table.labels):
            raise DataError(f"'{path}' has no object: {name} is {use}.")
        counts[name] = len(data)
        classes |= {data.classes[label] for label in np.unique(data.table.labels)}
        digests[name] = file_digest(path, "sha256")
    return OwnSet(folder.name, counts, len(classes), digests)


def _slug(text: str, *others: str) -> str:
    """Return a text as the name of a folder, which no other text has, nor the same with `others`."""
    digest = hashlib.sha256("\n".join((text, *others)).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9]+', '_', text).strip('_')[:60]}-{digest[:6]}"


def record_path(out: Path, words: str, name: str) -> Path:
    """Return the path of the record of a model on a dataset."""
    return out / "records" / _slug(words) / f"{name}.json"


def read_records(out: Path, protocol: Mapping[str, Any]) -> list[Record]:
    """Read the records of a folder, also of other models and of datasets that another command has trained on.

    Raises:
        ConfigError: one is of another protocol.
        DataError: one is not a record.
    """
    records = []
    for path in sorted((out / "records").glob("*/*.json")):
        record = read_json(path, key="record", remedy="")
        if not isinstance(record, dict) or not record.keys() >= FIELDS or not all(map(record.get, METRICS)):
            raise DataError(f"'{path}' is not a record that this tool wrote. Remove it to train and score again.")
        refuse_other_protocol(path, record["protocol"], protocol)
        records.append(record)
    return records


def _key(record: Record) -> tuple[str, str]:
    return record["model"], record["dataset"]


def refuse_other_model(record: Record, models: Mapping[str, Model]) -> None:
    """Raise a ConfigError if a record is of what its words trained before the config or the weights were changed."""
    model = models.get(record["model"])
    if model is not None and record.get("model_sha256", model.digest) != model.digest:
        raise ConfigError(
            f"the record of {record['dataset']} is of another model: the config or the weights of "
            f"{record['model']!r} were changed. Restore them, or give the changed ones another name, or another --out."
        )


def refuse_other_data(record: Record, dataset: OwnSet) -> None:
    """Raise a DataError if a record is of other annotations than the dataset has."""
    if record["annotations"] != dataset.annotations:
        raise DataError(
            f"its record is of other annotations than '{dataset.name}' has now. Restore them, or remove the record to "
            "train and score again."
        )


def train_and_score(args: argparse.Namespace, words: str, dataset: OwnSet, digest: str) -> Record:
    """Train a model on a dataset, or resume its run, and score its best checkpoint on test.

    Args:
        digest: that of the model: a run of a changed one is not resumed.
    Raises:
        VitkitError: training or scoring failed.
    """
    folder = args.out / "runs" / _slug(words, digest) / _slug(dataset.name, *dataset.annotations.values())
    output = folder.parent / f"{folder.name}.txt"

    def run(*command: str) -> None:
        with Child(["vitkit", *command, "--device", args.device], output, "; the same command resumes it") as child:
            child.finish()

    def data(split: str, folder: str) -> list[str]:
        images = (args.folder / dataset.name / folder).resolve()
        values = {"images": images, "annotations": images / ANNOTATIONS, "bad_boxes": "drop"}
        return [f"data.{split}.{key}={value}" for key, value in values.items()]

    command = ["train", *shlex.split(words), *data("train", "train"), *data("val", "valid")]
    command += [f"train.epochs={args.epochs}", f"train.eval_every={eval_every(args.epochs)}"]
    command += [f"train.seed={args.seed}", "evaluator.iou_types=[bbox]", f"evaluator.max_dets={MAX_DETS}"]
    command += ["train.best_metric=bbox/AP"]
    if (folder / LAST_NAME).is_file():
        run("train", "--resume", str(folder))
    else:
        shutil.rmtree(folder, ignore_errors=True)
        output.unlink(missing_ok=True)
        run(*command, "--run-dir", str(folder))
    results = folder / "test.json"
    on_test = data("val", "test")  # prepared like validation images, in whose place they are
    run("test", str(folder), *on_test, "--out", str(results))
    config, weights = find_trained(folder, overrides=on_test)
    statistics = score_results(results, config, weights).statistics("bbox")
    scores = statistics.scores(bootstrap_weights(len(statistics.sample_ids))).overall
    train, evaluations = read_log(folder / LOG_NAME)
    start = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))["starts"][0]
    return dict(
        model=words,
        dataset=dataset.name,
        **{metric: list(estimate(scores[f"bbox/{metric}"])) for metric in METRICS},
        valid_AP=max(record["metrics"]["bbox/AP"] for record in evaluations),
        images=dataset.num_images,
        classes=dataset.num_classes,
        epochs=args.epochs,
        steps=train[-1]["step"],
        minutes=evaluations[-1]["minutes"],
        processor_minutes=evaluations[-1]["processor_minutes"],
        command=shlex.join(["vitkit", *command]),
        versions=start["versions"],
        device=start["device"]["name"],
        threads=start["device"]["threads"],
        annotations=dataset.annotations,
        weights=file_digest(Path(weights), "sha256"),
        config=file_digest(folder / RUN_CONFIG, "sha256"),
    )


def in_words(record: Record) -> str:
    """Return the figures of a record: "AP 0.512 (0.480 to 0.541), AP50 ..., 3.1 min"."""
    figures = (f"{metric} {{:.3f}} ({{:.3f}} to {{:.3f}})".format(*record[metric]) for metric in METRICS)
    return f"{', '.join(figures)}, {record['minutes']:.1f} min"


def write_page(
    out: Path, protocol: Mapping[str, Any], records: Sequence[Record], num_datasets: int, failures: Mapping[str, str]
) -> None:
    """Write rf100.json, rf100.md and rf100.png."""
    if not records:
        return
    records = sorted(records, key=lambda record: record["dataset"])  # stable: models stay in their order
    summaries = summarize(records)
    page = dict(protocol=protocol, models=summaries, records=records, failures=failures)
    write_text(out / "rf100.json", json.dumps(page, indent=1) + "\n")
    write_text(out / "rf100.md", table(protocol, summaries, records, num_datasets, failures))
    plot_records(summaries, records, out / "rf100.png")


if __name__ == "__main__":
    sys.exit(main())
