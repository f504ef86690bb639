"""COCO files that once ended in a crash, a hang, a raw error or a wrong number: each is read and evaluated.

They are read in one child process with limited memory and time, as the C code of pycocotools can crash or hang.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import run_forked
from PIL import Image

from vitkit.data.datasets.captions import CocoCaptions
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.datasets.panoptic import CocoPanoptic
from vitkit.errors import VitkitError
from vitkit.evaluation.captions import CaptionEvaluator
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.evaluation.panoptic import PanopticEvaluator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and time as on Linux")

CORPUS = Path(__file__).resolve().parents[1] / "corpus" / "coco"
EXPECTED = {
    "instances_crowd_runs_do_not_fill_the_image": "annotation 2 .*run lengths that fill the image's 1280 pixels",
    "instances_crowd_runs_beyond_the_image": "annotation 2 .*run lengths that fill the image's 1280 pixels",
    "instances_crowd_runs_of_another_size": r"annotation 2 .*the image's size \[32, 40\]",
    "instances_crowd_runs_are_compressed_wrong": "annotation 2 .*counts as pycocotools compresses them",
    "instances_crowd_runs_overflow": "annotation 2 .*whole numbers above 0",
    "instances_crowd_runs_are_zero": "annotation 2 .*whole numbers above 0",
    "instances_crowd_polygon_is_far": "annotation 2 .*at most 10 times the size of the image",
    "instances_crowd_segmentation_is_null": "annotation 2 .*has segmentation None",
    "instances_fractional_runs": "annotation 1 .*whole numbers above 0",
    "instances_polygon_of_400_digits": "annotation 1 .*at most 10 times the size of the image",
    "instances_polygon_is_nan": "annotation 1 .*finite coordinates",
    "instances_polygon_is_a_box": "annotation 1 .*at least three finite points",
    "instances_huge_image": "image 10 .*has width 2147483648",
    "instances_area_null": "annotation 1 .*has area None",
    "instances_area_nan": "annotation 1 .*has area nan",
    "instances_area_infinite": "annotation 1 .*has area inf",
    "instances_iscrowd_null": "annotation 1 .*has iscrowd None",
    "instances_iscrowd_is_text": "annotation 1 .*has iscrowd '0'",
    "instances_bbox_of_400_digits": "annotation 1 .*has bbox",
    "instances_bbox_area_is_infinite": "annotation 1 .*has bbox",
    "instances_category_is_true": "annotation 1 .*has category_id True",
    "instances_category_is_fractional": r"annotation 1 .*has category_id 3\.5",
    "instances_number_of_5000_digits": "a number that is too long",
    "instances_nested_20000_deep": r"nests lists too deep|segmentation \[\[\[",
    "instances_file_name_is_half_a_character": "image 10 .*has file_name",
    "instances_file_name_ends_early": "image 10 .*has file_name",
    "instances_file_name_is_too_long": "image 10 .*has file_name",
    "instances_file_name_has_a_part_of_256_bytes": "image 10 .*at most 255 between slashes",
    "panoptic_iscrowd_null": "image 10: segment 1 has iscrowd None",
    "panoptic_iscrowd_is_text": "image 10: segment 1 has iscrowd '0'",
    "panoptic_isthing_is_text": "category 3 .*has isthing '0'",
    "panoptic_area_is_text": "image 10: segment 1 has area '640'",
    "panoptic_segment_is_true": "segment True has id True",
    "panoptic_segments_are_null": "image 10 has segments_info None",
    "captions_half_a_character": "annotation 1 .*has caption",
    "captions_image_is_true": "annotation 1 .*has image_id True",
    "captions_width_is_text": "image 10 .*has width '40'",
    "results_score_is_text": "entry 0 has score '0.5'",
    "results_score_is_nan": "entry 0 has score nan",
    "results_score_of_400_digits": "entry 0 has score 777",
    "results_bbox_is_null": "entry 0 has bbox None",
    "results_image_is_a_list": r"entry 0 has image_id \[10\]",
    "results_fractional_runs": "entry 0 .*whole numbers above 0",
    "results_runs_do_not_fill_the_image": "entry 0 .*run lengths that fill the image's 1280 pixels",
    "results_runs_of_another_size": r"image 10: a predicted mask has the size \[3, 4\]",
    "results_runs_are_compressed_wrong": "entry 0 .*it ends within a number",
    "results_polygon": "entry 0 .*expected run lengths",
}
SOUND = {
    "images": [{"id": 10, "file_name": "0.png", "height": 32, "width": 40}],
    "annotations": [
        {
            "id": 1,
            "image_id": 10,
            "category_id": 3,
            "bbox": [4, 5, 10, 12],
            "segmentation": [[4, 5, 14, 5, 14, 17, 4, 17]],
        },
        {
            "id": 2,
            "image_id": 10,
            "category_id": 3,
            "bbox": [4, 5, 10, 12],
            "iscrowd": 1,
            "segmentation": {"size": [32, 40], "counts": [100, 1180]},
        },
    ],
    "categories": [{"id": 3, "name": "cat"}, {"id": 7, "name": "sky"}],
}
RESULT = {
    "image_id": 10,
    "category_id": 3,
    "score": 0.5,
    "bbox": [4, 5, 10, 12],
    "segmentation": {"size": [32, 40], "counts": [100, 1180]},
}


def evaluate(path):
    kind = path.stem.split("_")[0]
    if kind == "captions":
        dataset = CocoCaptions(".", str(path), min_count=1)
        return dataset[0], CaptionEvaluator(dataset).compute()
    if kind == "panoptic":
        dataset = CocoPanoptic(".", "maps", str(path))
        return dataset[0], PanopticEvaluator(dataset).compute()
    instances, results = (path, "results.json") if kind == "instances" else ("instances.json", path)
    dataset = CocoDetection(".", str(instances), masks=True)
    evaluator = CocoEvaluator(dataset, iou_types=["bbox", "segm"])
    evaluator.load_results(results)
    return dataset[0], evaluator.compute()


def evaluate_all(names: list[str], folder: Path) -> None:
    """Evaluate files in a process with limited memory and time, and print the outcome of each."""
    import resource  # only available on Unix

    os.chdir(folder)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
    for name in names:
        # Of its own time, however busy the machine is. It ends the process: code in C takes no notice of exceptions.
        signal.setitimer(signal.ITIMER_PROF, 10)
        print(json.dumps([name, "started"]), flush=True)
        try:
            outcome = str(evaluate(Path(name))[1])
        except VitkitError as error:
            outcome = f"error: {error}"
        except BaseException as error:
            outcome = f"raw {error!r}"
        print(json.dumps([name, outcome]), flush=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, str]:
    """Return each file's outcome by its name without suffix; only "started": the process ended while reading it."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "maps").mkdir()
    Image.new("RGB", (40, 32)).save(folder / "0.png")
    ids = np.ones((32, 40, 1), np.uint8) * [1, 0, 0]
    ids[16:, :, 0] = 2
    Image.fromarray(ids.astype(np.uint8)).save(folder / "maps" / "0.png")
    (folder / "instances.json").write_text(json.dumps(SOUND))
    (folder / "results.json").write_text(json.dumps([RESULT]))
    files, outcomes = [str(folder / "instances.json"), *map(str, sorted(CORPUS.glob("*.json")))], {}
    while files:  # if a file ends the process, a new process reads the rest
        _, printed = run_forked(evaluate_all, files, folder)
        lines = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
        assert lines, printed
        outcomes |= {Path(name).stem: outcome for name, outcome in lines}
        files = files[files.index(lines[-1][0]) + 1 :]
    return outcomes


def test_every_file_of_the_corpus_has_an_expected_outcome():
    assert {path.stem for path in CORPUS.glob("*.json")} == EXPECTED.keys()


def test_valid_file_is_evaluated(outcomes):
    assert "'segm/AP': " in outcomes["instances"]


@pytest.mark.parametrize("name", EXPECTED)
def test_invalid_file_is_an_error_that_says_what_is_wrong(outcomes, name):
    assert outcomes[name].startswith("error: "), outcomes[name]
    assert re.search(EXPECTED[name], outcomes[name]), outcomes[name]
