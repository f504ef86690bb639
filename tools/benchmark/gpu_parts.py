"""The parts of gpu.py: tests, speed, training. Each part is a function that returns its rows."""

import os
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

import vitkit
from vitkit.engine.checkpointing import LAST_NAME
from vitkit.kernels.deformable_attention import plain
from vitkit.logging import LOG_NAME
from vitkit.tools.benchmark import kernels, models, timing
from vitkit.tools.benchmark.models import BACKBONE_FAMILIES, FAMILIES, Case, Contestant, Family
from vitkit.visualization.curves import read_log

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]
"""`what` is measured, and figures by name; `ok` if there is a goal."""

GOALS = {"detr": 1.3, "deformable_detr": 2.0, "mask2former": 2.0}
"""Part -> the goal for images per second relative to transformers'; the goal for memory is at most 0.8 of it."""
BATCH_SIZES = (2, 4, 8, 16)


@dataclass(frozen=True)
class Options:
    """Settings of all parts."""

    device: str
    tiny: bool
    """Whether to run the smallest form of each part, which only shows that its code runs."""
    data: Path
    """The folder of bccd, camvid and coco_tiny."""
    folder: Path
    """The folder that parts may write to."""


def run_tests(
    arguments: Sequence[str], options: Options, *, tiny: Sequence[str], on_device: bool = False, precision: str = "fp32"
) -> list[Row]:
    """Run pytest in the repository; count its results.

    Args:
        arguments: pytest's arguments.
        tiny: the arguments in the tiny form.
        on_device: whether these are tests for the CPU whose modules are to compute on the device, see
            tests/on_device.py.
    """
    report = options.folder / "tests.xml"
    environment = dict(os.environ, VITKIT_TEST_PRECISION=precision, PYTHONPATH=str(ROOT))
    environment["VITKIT_TEST_DEVICE" if on_device else "VITKIT_GPU_TESTS"] = options.device
    command = [sys.executable, "-m", "pytest", "-q", "--junitxml", str(report.resolve())]
    subprocess.run([*command, *(tiny if options.tiny else arguments)], cwd=ROOT, env=environment, stdout=sys.stderr)
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    ok = counts["failures"] == counts["errors"] == 0 < counts["tests"] - counts["skipped"]
    return [{"what": "tests", **counts, "ok": ok}, *({"what": name, "ok": False} for name in failed)]


def tune(options: Options) -> list[Row]:
    """Time the Triton kernels with other launch sizes; on the CPU, compile one and report its resources."""
    from vitkit.kernels.deformable_attention import triton as deformable

    if options.device == "cpu":
        from vitkit.tools.benchmark.compiled_ahead import compile_ahead, resources

        taken = resources(compile_ahead("forward", "sm_90", "bf16", **deformable.LAUNCHES["forward"]))
        return [{"what": "forward, bf16, compiled for sm_90", **taken._asdict()}]
    rows, usual = [], dict(deformable.LAUNCHES)
    for precision, name in product(("fp32", "bf16"), usual):
        case = kernels.DeformableCase(2, training=name == "backward", shapes=kernels.SHAPES_800X1333)
        call = kernels.attention(kernels.OURS, case, timing.Options(device="cuda", precision=precision))
        for tile, num_warps in product((256, 512, 1024, 2048), (2, 4, 8)):
            deformable.LAUNCHES[name] = dict(tile=tile, num_warps=num_warps)
            rows.append(
                {"what": f"{name}, {precision}, tile {tile}, {num_warps} warps", "ms": 1e3 * seconds(call, options)}
            )
        deformable.LAUNCHES[name] = usual[name]
    return rows


def measure_deformable(options: Options) -> list[Row]:
    """Measure deformable attention: `grid_sample`, the plain form compiled, Triton, and a copy of all its bytes."""
    rows = []
    cases = kernels.deformable_cases(options.device)
    if options.tiny:
        cases = [kernels.DeformableCase(1, 5, training, ((6, 8), (3, 4))) for training in (False, True)]
    for precision, case in product(("fp32", "bf16"), cases):
        timed = timing.Options(device=options.device, precision=precision)
        calls = {name: kernels.attention(name, case, timed) for name in (kernels.ORIGINAL, kernels.OURS)}
        if not options.tiny:
            calls["plain, compiled"] = compiled_plain(case, timed)
        times = {name: seconds(call, options) for name, call in calls.items()}
        limit, original = seconds(kernels.copying(case, timed), options), times[kernels.ORIGINAL]
        for name, taken in times.items():
            row = {"what": f"{case}, {precision}: {name}", "ms": 1e3 * taken, "times as fast": original / taken}
            row["of the bandwidth"] = limit / taken
            if name == kernels.OURS and not options.tiny:
                row["ok"] = original / taken >= 5 and (case.training or limit / taken >= 0.6)
            rows.append(row)
    return rows


def compiled_plain(case: kernels.DeformableCase, options: timing.Options) -> timing.Call:
    """Return a call of the plain definition of deformable attention, compiled by torch.compile."""
    function = torch.compile(plain.deformable_attend)
    inputs = kernels.deformable_inputs(case, options)
    return kernels.operator_call(lambda x, *rest: function(x, case.shapes, *rest), inputs, training=case.training)


def measure_training(part: str, options: Options) -> list[Row]:
    """Measure a model's training in bf16 at 800x1066, eager, compiled, and transformers', for each batch size."""
    family = FAMILIES[part]
    reference, ours = list(family.builders)[:2]
    builders = {reference: family.builders[reference], ours: family.builders[ours]}
    if not options.tiny:
        builders[f"{ours}, compiled"] = partial(compiled, family.builders[ours])
    cases = [Case(800, 1066, batch_size, True) for batch_size in BATCH_SIZES]
    return measure_family(
        family._replace(builders=builders), [Case(64, 96, 1, True)] if options.tiny else cases, options, GOALS.get(part)
    )


def measure_backbones(options: Options) -> list[Row]:
    """Measure each classifier's training step in bf16, and timm's."""
    rows = []
    for name, family in BACKBONE_FAMILIES.items():
        side = 256 if name.startswith("swinv2") else 224
        rows += measure_family(family, [Case(side, side, 1 if options.tiny else 64, True)], options, name=name)
    return rows


def measure_family(
    family: Family, cases: Sequence[Case], options: Options, goal: float | None = None, *, name: str = ""
) -> list[Row]:
    """Measure all contestants of a family; the others are compared with the first one."""
    rows = []
    for case in cases:
        reference = None
        for number, contestant in enumerate(family.builders):
            row = {"what": f"{contestant}{f' {name}' if name else ''}, {case}"}
            rows.append(row)
            try:
                row |= training_figures(family, contestant, case, options)
            except torch.OutOfMemoryError:
                row["out of memory"] = True
                continue
            if number == 0:
                reference = row
            if reference is None:
                continue
            row["times as fast"] = row["images/s"] / reference["images/s"]
            if "GiB" in row and "GiB" in reference:
                row["memory ratio"] = row["GiB"] / reference["GiB"]
                if goal and row is not reference:
                    row["ok"] = row["times as fast"] >= goal and row["memory ratio"] <= 0.8
    return rows


def training_figures(family: Family, contestant: str, case: Case, options: Options) -> Row:
    """Return images per second and, on a GPU, the peak memory of training."""
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    call = models.step(family, contestant, case, timing.Options(device=options.device, precision="bf16"))
    figures = {"images/s": case.batch_size / seconds(call, options)}
    return figures | ({"GiB": torch.cuda.max_memory_allocated() / 2**30} if on_gpu else {})


def compiled(build: Callable[..., Contestant], num_classes: int, batch: models.Batch, case: Case) -> Contestant:
    """Build a contestant whose model is compiled."""
    contestant = build(num_classes, batch, case)
    contestant.model.compile()
    return contestant


def measure_decoding(options: Options) -> list[Row]:
    """Measure beam decoding with the benchmark's part for it."""
    from vitkit.tools.benchmark import text

    timed = timing.Options(repeats=1 if options.tiny else 5, device=options.device, memory=False)
    tiny = text.Case(1, 32, 2, 64, vocabulary_size=100, batch_size=2, source_length=8, target_length=8)
    rows = text.measure_decoding(timed, tiny if options.tiny else text.BASE)
    return [{"what": f"{row.what}: {row.name}", "ms": 1e3 * row.seconds, "ratio": row.ratio} for row in rows]


def compare_curves(options: Options) -> list[Row]:
    """Train DETR-R50 on coco_tiny without randomness, 200 steps on the GPU and on the CPU, and compare the losses."""
    side, epochs = (64, 1) if options.tiny else (256, 8)
    curves = []
    for device in (options.device, "cpu"):
        run = vitkit.train(
            "detr_r50",
            run_dir=new_folder(options, f"curve_{device}"),
            device=device,
            **{
                "data.root": options.data / "coco_tiny",
                "data.train.transforms": dict(type="EvalResize", short_side=side, max_size=2 * side),
                "data.val.transforms": dict(type="EvalResize", short_side=side, max_size=2 * side),
                "data.num_workers": 0,
                "model.backbone.pretrained": False,
                "model.head.dropout": 0.0,
                "train": dict(epochs=epochs, eval_every=epochs, log_every=1),
            },
        )
        curves.append([record["loss"] for record in read_log(run.path / LOG_NAME)[0]])
    count = min(map(len, curves))
    first = max(abs(a - b) / b for a, b in zip(curves[0][:10], curves[1]))
    windows = [[statistics.mean(curve[i : i + 20]) for i in range(0, count, 20)] for curve in curves]
    later = max(abs(a - b) / b for a, b in zip(*windows))
    row = {"what": f"DETR-R50, coco_tiny, {count} steps, GPU and CPU", "difference of the first 10": first}
    return [row | {"of means over 20 steps": later, "ok": first < 0.01 and later < 0.1}]


def train_to_the_end(config: str, data: str, metric: str, expected: float, options: Options) -> list[Row]:
    """Train or resume a small run; return its metric, its minutes, and the fraction of time spent waiting for data."""
    settings, folder = {}, options.folder / data
    if options.tiny:
        small = dict(type="EvalResize", short_side=64, max_size=96)
        settings = {"train.epochs": 1, "data.train.transforms": small, "data.val.transforms": small}
        folder = options.folder / f"{data}_tiny"
    start = time.monotonic()
    if (folder / LAST_NAME).exists():
        run = vitkit.train(resume=folder, device=options.device)
    else:
        workers = min(8, (os.cpu_count() or 2) - 1)
        settings |= {"data.root": options.data / data, "data.num_workers": workers}
        run = vitkit.train(config, run_dir=folder, device=options.device, **settings)
    minutes = (time.monotonic() - start) / 60
    waited = statistics.mean(record["data_share"] for record in read_log(run.path / LOG_NAME)[0])
    row = {"what": config, metric: run.metrics[metric], "minutes": minutes, "waiting for data": waited}
    return [row if options.tiny else row | {"ok": run.metrics[metric] >= expected - 0.03}]


def new_folder(options: Options, name: str) -> Path:
    """Return a folder that does not exist yet."""
    number = 1
    while (folder := options.folder / f"{name}_{number}").exists():
        number += 1
    return folder


def seconds(call: timing.Call, options: Options) -> float:
    """Return the mean time of a call, after warm-up calls that include compilation."""
    warm_up, repeats = (1, 1) if options.tiny else (5, 20)
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    for _ in range(warm_up):
        call()
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return (time.perf_counter() - start) / repeats
