"""Latency of real-time detectors by the fastest path that each tool offers, at the sizes that they are made for.

On a CPU: vitkit's models by PyTorch, compiled by inductor, and as ONNX files by ONNX Runtime (float32 and int8) and by
OpenVINO; beside them transformers' models, also compiled, the official code, and ONNX files from outside. On a GPU
compiled models launch all kernels at once as a CUDA graph.

Weights are random, which does not change the work: every image gets the same number of queries. vitkit's rows go from
uint8 pixels to boxes in pixels; transformers' and the official code's begin with normalized images and end before
their post-processing. Files from outside run as they are. The ratio is that to transformers' fastest row.
"""

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vitkit import build_model, load_config
from vitkit.apps.conversion.transformers_writing import make_config_json
from vitkit.apps.export_reading.graphs import ExportGraph, image_graph
from vitkit.apps.export_reading.runtimes import ExportedFile, OnnxFile, OpenVinoFile, import_optional_module, read_onnx
from vitkit.apps.export_reading.settings import ExportSettings, Runtime
from vitkit.apps.export_writing.checks import Inputs, run_graph
from vitkit.apps.export_writing.export import Part, make_image_example, quantize, write_part
from vitkit.apps.inference import Predictor
from vitkit.errors import ConfigError, DataError
from vitkit.tools.benchmark.models import Case, import_transformers, step
from vitkit.tools.benchmark.realtime import FAMILIES
from vitkit.tools.benchmark.timing import Call, Measurement, OnnxFromOutside, Options, ratios_to, time_in_turn


class Published(NamedTuple):
    """The published figures of a model."""

    config: str
    side: int
    """Height and width of its images in pixels."""
    ap: float | None
    """COCO AP of boxes, of masks for RF-DETR-Seg and ECSeg, of keypoints for ECPose; None if it is not published."""
    milliseconds: float | None
    """Latency on a T4 by TensorRT in float16; None if it is not in the project's README."""


MODELS = {
    "D-FINE-N": Published("dfine_n_coco", 640, 42.8, 2.12),
    "D-FINE-S": Published("dfine_s_coco", 640, 48.5, 3.49),
    "D-FINE-M": Published("dfine_m_coco", 640, 52.3, 5.62),
    "D-FINE-L": Published("dfine_l_coco", 640, 54.0, 8.07),
    "D-FINE-X": Published("dfine_x_coco", 640, 55.8, 12.89),
    **{f"D-FINE-Seg-{size}": Published(f"dfine_seg_{size.lower()}_coco", 640, None, None) for size in "NSMLX"},
    "DEIMv2-Atto": Published("deimv2_atto_coco", 320, 23.8, 1.10),
    "DEIMv2-Femto": Published("deimv2_femto_coco", 416, 31.0, 1.45),
    "DEIMv2-Pico": Published("deimv2_pico_coco", 640, 38.5, 2.13),
    "DEIMv2-N": Published("deimv2_n_coco", 640, 43.0, 2.32),
    "DEIMv2-S": Published("deimv2_s_coco", 640, 50.9, 5.78),
    "DEIMv2-M": Published("deimv2_m_coco", 640, 53.0, 8.80),
    "DEIMv2-L": Published("deimv2_l_coco", 640, 56.0, 10.47),
    "DEIMv2-X": Published("deimv2_x_coco", 640, 57.8, 13.75),
    "ECDet-S": Published("ecdet_s_coco", 640, 51.7, 5.41),
    "ECDet-M": Published("ecdet_m_coco", 640, 54.3, 7.98),
    "ECDet-L": Published("ecdet_l_coco", 640, 57.0, 10.49),
    "ECDet-X": Published("ecdet_x_coco", 640, 57.9, 12.70),
    "ECSeg-S": Published("ecseg_s_coco", 640, 43.0, 6.96),
    "ECSeg-M": Published("ecseg_m_coco", 640, 45.2, 9.85),
    "ECSeg-L": Published("ecseg_l_coco", 640, 47.1, 12.56),
    "ECSeg-X": Published("ecseg_x_coco", 640, 48.4, 14.96),
    "ECPose-S": Published("ecpose_s_coco", 640, 68.9, 5.54),
    "ECPose-M": Published("ecpose_m_coco", 640, 72.4, 9.25),
    "ECPose-L": Published("ecpose_l_coco", 640, 73.5, 11.83),
    "ECPose-X": Published("ecpose_x_coco", 640, 74.8, 14.31),
    "RF-DETR-N": Published("rf_detr_n_coco", 384, 48.4, 2.3),
    "RF-DETR-S": Published("rf_detr_s_coco", 512, 53.0, 3.5),
    "RF-DETR-M": Published("rf_detr_m_coco", 576, 54.7, 4.4),
    "RF-DETR-L": Published("rf_detr_l_coco", 704, 56.5, 6.8),
    "RF-DETR-Seg-N": Published("rf_detr_seg_n_coco", 312, 40.3, 3.4),
    "RF-DETR-Seg-S": Published("rf_detr_seg_s_coco", 384, 43.1, 4.4),
    "RF-DETR-Seg-M": Published("rf_detr_seg_m_coco", 432, 45.3, 5.9),
    "RF-DETR-Seg-L": Published("rf_detr_seg_l_coco", 504, 47.1, 8.8),
    "RT-DETR-R18": Published("rtdetr_r18", 640, 46.4, 4.6),
    "RT-DETR-R34": Published("rtdetr_r34", 640, 48.9, 6.2),
    "RT-DETR-R50": Published("rtdetr_r50", 640, 53.1, 9.3),
    "RT-DETR-R101": Published("rtdetr_r101", 640, 54.3, 13.5),
    "RT-DETRv2-R18": Published("rtdetrv2_r18", 640, 47.9, None),
    "RT-DETRv2-R34": Published("rtdetrv2_r34", 640, 49.9, None),
    "RT-DETRv2-R50": Published("rtdetrv2_r50", 640, 53.4, None),
    "RT-DETRv2-R101": Published("rtdetrv2_r101", 640, 54.3, None),
}
"""DEIM's are D-FINE's networks, with another activation in the decoder."""
DEFAULT_MODELS = ("D-FINE-N", "D-FINE-S", "RT-DETR-R18", "RF-DETR-N", "DEIMv2-S", "DEIMv2-Atto")
"""What is measured unless models are chosen, as all take hours."""
OFFICIAL = {"D-FINE-N": "dfine_n", "D-FINE-S": "dfine_s", "RF-DETR-N": "rf_detr_n"}
"""Model -> the family in `realtime` with the official code, if that can be imported."""
SIDE = 640
"""Height and width of the images of a file from outside that takes any."""


@dataclass(frozen=True)
class Job:
    """A model, and how it is run."""

    name: str
    model: Published
    batch_size: int
    options: Options
    folder: Path
    """Where its files are written."""

    def what(self) -> str:
        """Return the model's name with its size and its published latency."""
        published = f" (T4: {self.model.milliseconds} ms)" if self.model.milliseconds else ""
        return f"{self.name}, {self.model.side}x{self.model.side}{published}"

    def spec(self) -> dict[str, Any]:
        """Return the model section of its config, without what exists in training only."""
        section = load_config(self.model.config)["model"]
        return {name: value for name, value in section.items() if name != "training_queries"}


def graph_and_inputs(job: Job, device: str = "cpu") -> tuple[ExportGraph, Inputs]:
    """Return a model with random weights, from uint8 pixels to boxes in pixels, and the inputs of a batch."""
    torch.manual_seed(0)
    graph = image_graph(build_model(job.spec()).to(device).eval().fuse())
    return graph, image_batch(job, device)


def image_batch(job: Job, device: str = "cpu") -> Inputs:
    """Return a batch of random images without padding."""
    side, size = job.model.side, job.batch_size
    return dict(
        images=torch.randint(256, (size, 3, side, side), dtype=torch.uint8, device=device),
        padding_mask=torch.zeros(size, side, side, dtype=torch.bool, device=device),
        image_sizes=torch.full((size, 2), side, device=device),
    )


def by_pytorch(job: Job, *, compiled: bool = False) -> Call:
    """Return a call of the model by PyTorch."""
    graph, inputs = graph_and_inputs(job, job.options.device)
    if compiled:
        graph.compile(mode=compile_mode(job.options))

    def call() -> Inputs:
        with job.options.autocast():
            return run_graph(graph, inputs)

    return call


def compile_mode(options: Options) -> str:
    """Return how models are compiled: on a GPU as CUDA graphs."""
    return "reduce-overhead" if options.device == "cuda" else "default"


def by_file(job: Job, runtime: Runtime, *, quantized: bool = False) -> Call:
    """Return a call of the model's ONNX file for one size of images."""
    path = export_once(job, quantized)
    file, inputs = open_on_cpu(path, runtime), image_batch(job)
    return lambda: file.run(inputs)


def export_once(job: Job, quantized: bool) -> Path:
    """Return the model's ONNX file, in float32 or int8; it is written once for all that run it."""
    path = job.folder / f"{job.name}.onnx"
    if not path.exists():
        size = (job.model.side, job.model.side)
        graph, _ = graph_and_inputs(job)
        write_part(Part("", graph, [], make_image_example(size)), path, ExportSettings(size=size), {})
    if not quantized:
        return path
    in_int8 = path.with_suffix(".int8.onnx")
    if not in_int8.exists():
        quantize(path, in_int8)
    return in_int8


def by_transformers(job: Job, *, compiled: bool = False) -> Call:
    """Return a call of transformers' model of the same settings."""
    transformers = import_transformers()
    classes = [str(number) for number in range(80)]
    with torch.device("meta"):
        ours = Predictor(build_model(job.spec(), classes=classes), classes)
    values = make_config_json(ours, job.spec())
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**values)
    model = getattr(transformers, values["architectures"][0])(config).to(job.options.device).eval()
    images = torch.randn(job.batch_size, 3, job.model.side, job.model.side, device=job.options.device)
    if compiled:
        model.compile(mode=compile_mode(job.options))

    def call() -> Any:
        with torch.inference_mode(), job.options.autocast():
            return model(images)

    return call


def by_official_code(job: Job) -> Call:
    """Return a call of the authors' model."""
    family = FAMILIES[OFFICIAL[job.name]]
    (name,) = (name for name in family.builders if name.startswith("official"))
    return step(family, name, Case(job.model.side, job.model.side, job.batch_size), job.options)


def by_file_from_outside(file: OnnxFromOutside, batch_size: int, runtime: Runtime) -> Call:
    """Return a call of an ONNX file from outside, by the settings of vitkit's own files.

    Raises:
        CheckpointError: it is not an ONNX file, or the runtime cannot open it.
        DataError: it takes something else than a batch of images.
    """
    inputs = inputs_from_outside(file, batch_size)
    opened = open_on_cpu(file.path, runtime)
    return lambda: opened.run(inputs)


def open_on_cpu(path: Path, runtime: Runtime) -> ExportedFile:
    """Open an ONNX file to run on the CPU, as all rows of files do."""
    return OnnxFile(path, {}, on_cpu=True) if runtime == "onnxruntime" else OpenVinoFile(path, {})


def inputs_from_outside(file: OnnxFromOutside, batch_size: int) -> Inputs:
    """Return random images for an ONNX file, of the size that it takes, or of SIDE where any is taken."""
    onnx, graph = import_optional_module("onnx"), read_onnx(file.path).graph
    weights = {weight.name for weight in graph.initializer}  # which older files list as inputs, too
    taken = [value for value in graph.input if value.name not in weights]
    shapes = [[dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in taken]
    if len(taken) != 1 or len(shapes[0]) != 4 or shapes[0][1] not in (0, 3):
        names = ", ".join(f"{value.name} {shape}" for value, shape in zip(taken, shapes))
        raise DataError(f"{file.path}: takes {names}; expected one input of images, [batch, 3, height, width].")
    fixed, (*_, height, width) = shapes[0][0], shapes[0]
    if fixed not in (0, batch_size):
        raise DataError(f"{file.path}: takes batches of {fixed}; got {batch_size}.")
    images = torch.rand(batch_size, 3, height or SIDE, width or SIDE)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(taken[0].type.tensor_type.elem_type)
    if dtype == np.uint8:
        images = 255 * images
    return {taken[0].name: torch.from_numpy(images.numpy().astype(dtype))}


class Form(NamedTuple):
    """A way to run a model."""

    name: str
    """Name of its rows."""
    build: Callable[[Job], Call]
    missing: Callable[[], str | None] = lambda: None
    """Returns what it needs and this machine lacks; None if nothing."""


def missing_compiler() -> str | None:
    """Return why inductor cannot compile for the CPU."""
    compiler = os.environ.get("CXX", "g++")
    return None if shutil.which(compiler) else f"no C++ compiler ({compiler})"


def missing_package(name: str, extra: str) -> str | None:
    """Return a message with the command that installs a missing package; None if it is installed."""
    return None if find_spec(name) else f"no package {name} (pip install 'vitkit[{extra}]')"


_TRANSFORMERS = partial(missing_package, "transformers", "benchmark")
_ONNX_RUNTIME = partial(missing_package, "onnxruntime", "export")
_OPENVINO = partial(missing_package, "openvino", "openvino")
FORMS: dict[str, dict[str, Form]] = {
    "cpu": {
        "vitkit": Form("vitkit", by_pytorch),
        "vitkit-compiled": Form("vitkit, compiled", partial(by_pytorch, compiled=True), missing_compiler),
        "onnxruntime": Form("vitkit, ONNX Runtime", partial(by_file, runtime="onnxruntime"), _ONNX_RUNTIME),
        "int8": Form(
            "vitkit, ONNX Runtime int8", partial(by_file, runtime="onnxruntime", quantized=True), _ONNX_RUNTIME
        ),
        "openvino": Form("vitkit, OpenVINO", partial(by_file, runtime="openvino"), _OPENVINO),
        "transformers": Form("transformers", by_transformers, _TRANSFORMERS),
        "transformers-compiled": Form(
            "transformers, compiled",
            partial(by_transformers, compiled=True),
            lambda: _TRANSFORMERS() or missing_compiler(),
        ),
        "official": Form("official code", by_official_code),
    }
}
"""Device -> option of --rows -> the form; those of a CPU in the order of the table."""
FORMS["cuda"] = {
    "vitkit": FORMS["cpu"]["vitkit"],
    "vitkit-compiled": FORMS["cpu"]["vitkit-compiled"]._replace(missing=lambda: None),
    "transformers": FORMS["cpu"]["transformers"],
    "transformers-compiled": FORMS["cpu"]["transformers-compiled"]._replace(missing=_TRANSFORMERS),
    "official": FORMS["cpu"]["official"],
}
OUTSIDE: dict[str, tuple[str, Runtime]] = {
    "onnxruntime": ("file from outside, ONNX Runtime", "onnxruntime"),
    "openvino": ("file from outside, OpenVINO", "openvino"),
}
"""Option of --rows -> the name of the row of a file from outside, and what runs it."""


def choose_forms(options: Options) -> dict[str, Form]:
    """Return the forms that are measured: those asked for, or all that this machine has, and say what it lacks.

    Raises:
        ConfigError: a form that is asked for does not exist on the device, or this machine lacks what it needs.
    """
    forms = FORMS[options.device]
    chosen = {}
    for key in options.rows or forms:
        if key not in forms:
            raise ConfigError(f"--rows {key}: expected {', '.join(forms)} on the device {options.device}.")
        missing = forms[key].missing()
        if missing and options.rows:
            raise ConfigError(f"--rows {key}: {missing}.")
        if missing:
            print(f"no rows of {key}: {missing}", file=sys.stderr, flush=True)
        else:
            chosen[key] = forms[key]
    return chosen


def check_options(options: Options) -> None:
    """Check what is asked for before anything is measured.

    Raises:
        ConfigError: see `choose_forms`; or nothing that is measured runs the files from outside.
        CheckpointError, DataError: a file from outside cannot be read, or takes something else than a batch of images.
    """
    forms = choose_forms(options) if options.rows else FORMS[options.device]
    for file, batch_size in product(options.onnx, options.batch_sizes):
        inputs_from_outside(file, batch_size)
    if options.onnx and not forms.keys() & OUTSIDE.keys():
        raise ConfigError(
            f"--onnx: files from outside are run by {' and '.join(OUTSIDE)}; got the rows {', '.join(forms)}. Add one "
            "of them to --rows, on the device cpu, or leave --onnx out."
        )


def measure(part: str, options: Options) -> list[Measurement]:
    """Measure models and files from outside; `part` is the only one, "latency"."""
    forms, rows = choose_forms(options), []
    for batch_size in options.batch_sizes:
        setting = f"batch {batch_size}" if batch_size > 1 else ""
        for name in MODELS if "all" in options.models else options.models or DEFAULT_MODELS:
            with tempfile.TemporaryDirectory() as folder:
                job = Job(name, MODELS[name], batch_size, options, Path(folder))
                has_official = name in OFFICIAL and len(FAMILIES[OFFICIAL[name]].builders) > 2
                builders = {
                    form.name: partial(form.build, job)
                    for key, form in forms.items()
                    if key != "official" or has_official
                }
                rows += compare_forms(job.what(), builders, options, published_ap=job.model.ap, setting=setting)
        for file in options.onnx:
            inputs = inputs_from_outside(file, batch_size)
            what = f"{file.name}, " + "x".join(str(side) for side in next(iter(inputs.values())).shape[-2:])
            builders = {
                OUTSIDE[key][0]: partial(by_file_from_outside, file, batch_size, OUTSIDE[key][1])
                for key in forms
                if key in OUTSIDE
            }
            rows += compare_forms(what, builders, options, published_ap=file.ap, setting=setting)
    return rows


def compare_forms(
    what: str, builders: Mapping[str, Callable[[], Call]], options: Options, *, published_ap: float | None, setting: str
) -> list[Measurement]:
    """Time a model's forms in turn; a form that cannot be built or run gets a row with the reason.

    The ratio is that to transformers' fastest form, where there is one.
    """
    torch._dynamo.reset()  # a function is compiled for eight models at most, and from the second on for free sizes
    calls, reasons = {}, {}
    for name, build in builders.items():
        print(f"building {what}: {name}", file=sys.stderr, flush=True)
        try:
            call = build()
            call()  # compilers work at the first call
            calls[name] = call
        except Exception as error:  # of any kind, from compilers and from the packages that are compared
            reasons[name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:150]
    times = time_in_turn(calls, options)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    theirs = [name for name in medians if name.startswith("transformers")]
    fastest = min(theirs, key=medians.__getitem__, default=None)
    about = dict(published_ap=published_ap, setting=setting)
    rows = []
    for name in builders:
        if name in reasons:
            rows.append(Measurement(what, name, None, None, **about, note=reasons[name]))
            continue
        ratios = ratios_to(times[fastest], times[name]) if fastest else {}
        rows.append(Measurement(what, name, medians[name], None, **about)._replace(**ratios))
    return rows
