"""Latency of real-time detectors at the sizes that they are made for, by PyTorch and, on a CPU, as an ONNX file; on a
GPU by PyTorch and compiled, with all kernels launched at once as a CUDA graph.

Weights are random, which does not change the work: every image gets the same number of queries. The published figure
beside each model is its latency on a T4 by TensorRT in float16 (README of its project).
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from vitkit import build_model, load_config
from vitkit.apps.deployment.checks import Inputs, run_graph
from vitkit.apps.deployment.export import Part, make_image_example, write_part
from vitkit.apps.exported.graphs import ExportGraph, image_graph
from vitkit.apps.exported.loading import open_exported
from vitkit.apps.exported.settings import ExportSettings
from vitkit.tools.benchmark.timing import Call, Options, Row, compare


class Published(NamedTuple):
    """What is published of a model."""

    config: str
    side: int
    """Height and width of its images in pixels."""
    milliseconds: float | None
    """Latency on a T4; None if it is not in the project's README."""


MODELS = {
    "D-FINE-N": Published("dfine_n_coco", 640, 2.12),
    "D-FINE-S": Published("dfine_s_coco", 640, 3.49),
    "D-FINE-M": Published("dfine_m_coco", 640, 5.62),
    "D-FINE-L": Published("dfine_l_coco", 640, 8.07),
    "D-FINE-X": Published("dfine_x_coco", 640, 12.89),
    "DEIMv2-Atto": Published("deimv2_atto_coco", 320, 1.10),
    "DEIMv2-Femto": Published("deimv2_femto_coco", 416, 1.45),
    "DEIMv2-Pico": Published("deimv2_pico_coco", 640, 2.13),
    "DEIMv2-N": Published("deimv2_n_coco", 640, 2.32),
    "DEIMv2-S": Published("deimv2_s_coco", 640, 5.78),
    "DEIMv2-M": Published("deimv2_m_coco", 640, 8.80),
    "DEIMv2-L": Published("deimv2_l_coco", 640, 10.47),
    "DEIMv2-X": Published("deimv2_x_coco", 640, 13.75),
    "RF-DETR-N": Published("rf_detr_n_coco", 384, 2.3),
    "RF-DETR-S": Published("rf_detr_s_coco", 512, 3.5),
    "RF-DETR-M": Published("rf_detr_m_coco", 576, 4.4),
    "RF-DETR-L": Published("rf_detr_l_coco", 704, 6.8),
    "RF-DETR-Seg-N": Published("rf_detr_seg_n_coco", 312, 3.4),
    "RF-DETR-Seg-S": Published("rf_detr_seg_s_coco", 384, 4.4),
    "RF-DETR-Seg-M": Published("rf_detr_seg_m_coco", 432, 5.9),
    "RF-DETR-Seg-L": Published("rf_detr_seg_l_coco", 504, 8.8),
    "RT-DETR-R18": Published("rtdetr_r18", 640, 4.6),
    "RT-DETR-R34": Published("rtdetr_r34", 640, 6.2),
    "RT-DETR-R50": Published("rtdetr_r50", 640, 9.3),
    "RT-DETR-R101": Published("rtdetr_r101", 640, 13.5),
    "RT-DETRv2-R18": Published("rtdetrv2_r18", 640, None),
    "RT-DETRv2-R34": Published("rtdetrv2_r34", 640, None),
    "RT-DETRv2-R50": Published("rtdetrv2_r50", 640, None),
    "RT-DETRv2-R101": Published("rtdetrv2_r101", 640, None),
}
"""DEIM's are D-FINE's networks, with another activation in the decoder."""


def graph_and_inputs(config: str, side: int, device: str = "cpu") -> tuple[ExportGraph, Inputs]:
    """Return a model with random weights, from uint8 pixels to boxes in pixels, and the inputs of one image."""
    torch.manual_seed(0)
    spec = {name: value for name, value in load_config(config)["model"].items() if name != "training_queries"}
    graph = image_graph(build_model(spec).to(device).eval().fuse())
    inputs = {name: value[:1].to(device) for name, value in make_image_example((side, side)).items()}
    return graph, inputs | {"images": torch.randint(256, (1, 3, side, side), dtype=torch.uint8, device=device)}


def by_pytorch(config: str, side: int, options: Options, *, compiled: bool = False) -> Call:
    """Return a call of the model by PyTorch; `compiled`: as CUDA graphs, which takes minutes to build."""
    graph, inputs = graph_and_inputs(config, side, options.device)
    if compiled:
        torch._dynamo.reset()  # a function is compiled for eight models at most, and from the second on for free sizes
        graph.compile(mode="reduce-overhead")

    def call() -> Inputs:
        with options.autocast():
            return run_graph(graph, inputs)

    return call


def by_onnx_runtime(config: str, side: int, options: Options) -> Call:
    """Return a call of the model's ONNX file for one size."""
    graph, inputs = graph_and_inputs(config, side)
    settings = ExportSettings(size=(side, side))
    metadata = dict(config={}, inputs=list(inputs), size=settings.size, postprocessing=None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        write_part(Part("", graph, [], make_image_example(settings.size)), path, settings, metadata)
        file = open_exported(path)
    return lambda: file.run(inputs)


BUILDERS: dict[str, dict[str, Callable[[str, int, Options], Call]]] = {
    "cpu": {"PyTorch": by_pytorch, "ONNX Runtime": by_onnx_runtime},
    "cuda": {"PyTorch": by_pytorch, "PyTorch, compiled": partial(by_pytorch, compiled=True)},
}
"""Device -> name of the row -> a function of the config, the side and the options."""


def measure(part: str, options: Options) -> list[Row]:
    """Measure all models; `part` is the only one, "latency"."""
    rows = []
    for name, (config, side, milliseconds) in MODELS.items():
        what = f"{name}, {side}x{side}" + (f" (T4: {milliseconds} ms)" if milliseconds else "")
        builders = {row: partial(build, config, side, options) for row, build in BUILDERS[options.device].items()}
        rows += compare(what, builders, options, memory=False)
    return rows
