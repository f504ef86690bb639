"""Runtimes of exported ONNX files, ONNX Runtime and OpenVINO, as functions of named tensors."""

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from vitkit.apps.export_reading.settings import Runtime
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.registry import nearest_file

_LOOPS = {"Loop", "Scan", "SequenceMap"}
"""ONNX's operations that run a graph of their own many times."""
_FATAL = 4
"""ONNX Runtime's level of logging: it raises errors, which are reported once."""
_IGNORED_IN_RESIZE = ("antialias", "exclude_outside")
"""Attributes of ONNX's Resize that OpenVINO does not read (2026.4)."""
_MAX_SECONDS = 1800.0
"""The time in which a file is opened, and in which it computes a batch; a kilobyte of products may take weeks."""
_Result = TypeVar("_Result")


def import_optional_module(name: str, *, extra: str = "export") -> ModuleType:
    """Import a package of an extra.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{extra}: needs the package {error.name or name}: pip install 'vitkit[{extra}]'") from error


class ExportedFile(Protocol):
    """An exported file as a function of named tensors."""

    path: str | Path
    metadata: Mapping[str, Any]
    """The model's metadata from `describe`, and the settings of the file."""
    inputs: Sequence[str]

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Run the file and return its outputs on the CPU; it ignores inputs that it does not take.

        Args:
            inputs: tensors by name.
            outputs: names of the outputs to return; None: all.
        Raises:
            DataError: the inputs have a shape that the file does not take.
        """


class OnnxFile:
    """An ONNX file, run by ONNX Runtime; on a GPU if the installed package supports it.

    Args:
        path: a file that was read by `read_onnx` before, as its graph may otherwise run without an end.
        metadata: see `ExportedFile`; empty for a file that vitkit has not written.
        on_cpu: leave a GPU alone.
    Raises:
        CheckpointError: ONNX Runtime cannot open the file.
    """

    def __init__(self, path: str | Path, metadata: Mapping[str, Any], *, on_cpu: bool = False):
        runtime = import_optional_module("onnxruntime")
        self.path, self.metadata = path, metadata
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = _FATAL
        wanted = ("CPUExecutionProvider",) if on_cpu else ("CUDAExecutionProvider", "CPUExecutionProvider")
        providers = [provider for provider in wanted if provider in runtime.get_available_providers()]
        try:
            self._session = _in_time(path, lambda: runtime.InferenceSession(str(path), options, providers=providers))
        except CheckpointError:
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no common base class
            raise CheckpointError(f"{path}: ONNX Runtime cannot open it ({first_line(error)}).") from error
        self._options = runtime.RunOptions()
        self._options.log_severity_level = _FATAL
        self._options.only_execute_path_to_fetches = True
        self.inputs = [value.name for value in self._session.get_inputs()]
        self.outputs = [value.name for value in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str] | None = None) -> dict[str, Tensor]:
        names = self.outputs if outputs is None else [name for name in self.outputs if name in outputs]
        arrays = {name: value.cpu().numpy() for name, value in select_inputs(self, inputs).items()}
        try:
            values = _in_time(self.path, lambda: self._session.run(names, arrays, self._options))
        except CheckpointError:
            self._options.terminate = True  # between two nodes
            raise
        except Exception as error:  # as above
            raise refusal(self.path, inputs, first_line(error)) from error
        return {name: torch.from_numpy(value) for name, value in zip(names, values)}


class OpenVinoFile:
    """An ONNX file, run by OpenVINO on the CPU, in float32 unless its weights are quantized.

    Args:
        path, metadata: see `OnnxFile`.
    Raises:
        CheckpointError: OpenVINO cannot read the file, or would compute something else than it says.
    """

    def __init__(self, path: str | Path, metadata: Mapping[str, Any]):
        openvino = import_optional_module("openvino", extra="openvino")
        self.path, self.metadata = path, metadata
        model = read_onnx(path)
        for node in _nodes(model):
            ignored = [item.name for item in node.attribute if item.name in _IGNORED_IN_RESIZE and item.i]
            if node.op_type == "Resize" and ignored:
                # Its outputs would be wrong without an error, as for a ViT's positions at fewer patches.
                raise CheckpointError(
                    f"{path}: OpenVINO ignores {ignored[0]} of Resize, so that it would predict something else. Export "
                    "the model for one size (--size HxW), or use runtime onnxruntime."
                )
        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            # Its default is bfloat16 on processors that have it.
            "INFERENCE_PRECISION_HINT": "f32",
            # Otherwise the processes of a machine would all compute on the same cores.
            "ENABLE_CPU_PINNING": False,
        }
        try:
            self._model = _in_time(path, lambda: openvino.Core().compile_model(str(path), "CPU", settings))
        except CheckpointError:
            raise
        except Exception as error:  # OpenVINO raises RuntimeError, and TypeError for what it cannot convert
            version = openvino.__version__.partition("-")[0]
            raise CheckpointError(
                f"{path}: OpenVINO {version} cannot read it ({_last_line(error)}). Use runtime onnxruntime, or export "
                "the model with another opset."
            ) from error
        # In the file's order; a port may also have names of what is equal to it.
        weights = {weight.name for weight in model.graph.initializer}
        self.inputs = [value.name for value in model.graph.input if value.name not in weights]
        self.outputs = [value.name for value in model.graph.output]
        self._dtypes = {name: self._model.input(name).get_element_type().to_dtype() for name in self.inputs}

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str] | None = None) -> dict[str, Tensor]:
        arrays = {name: value.cpu().numpy() for name, value in select_inputs(self, inputs).items()}
        for name, array in arrays.items():
            if array.dtype != self._dtypes[name]:  # which OpenVINO would convert, and 0..1 to zeros
                raise refusal(self.path, inputs, f"{name} is {array.dtype}; expected {self._dtypes[name]}")
        request = self._model.create_infer_request()  # of its own, as several threads may predict
        try:
            values = _in_time(self.path, lambda: request.infer(arrays, share_inputs=True).to_tuple())
        except CheckpointError:
            request.cancel()
            raise
        except Exception as error:  # as above
            raise refusal(self.path, inputs, _last_line(error)) from error
        if arrays and not any(map(len, values)) and all(map(len, arrays.values())):
            # So it is if fewer locations are there than queries are selected of.
            raise refusal(self.path, inputs, "OpenVINO returned outputs of no image; are the images too small?")
        results = zip(self.outputs, values)
        return {name: torch.from_numpy(value) for name, value in results if outputs is None or name in outputs}


def _in_time(path: str | Path, call: Callable[[], _Result]) -> _Result:
    """Call a runtime in a thread and wait in Python, as nothing, not even ctrl-C, ends the call itself.

    Raises:
        CheckpointError: it takes more than `_MAX_SECONDS`. What the call raises is raised as well.
    """
    done: Future[_Result] = Future()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    # Unlike a pool's thread, this one does not keep the process from ending.
    threading.Thread(target=work, daemon=True).start()
    if not wait([done], _MAX_SECONDS).done:
        raise CheckpointError(
            f"{path}: has not computed anything in {_MAX_SECONDS:g} s. Export the model again, or use a faster device."
        )
    return done.result()


def read_onnx(path: str | Path) -> Any:
    """Return an ONNX file as the package onnx reads it; its graph runs each of its nodes at most once.

    A small file can otherwise ask for 2^60 iterations, which neither opening nor running it would end.

    Raises:
        CheckpointError: there is no such file, it has loops or functions, or is not an ONNX file.
    """
    require_file(path)
    onnx = import_optional_module("onnx")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # of protobuf or of files, depending on where it is damaged
        raise CheckpointError(f"{path}: not an ONNX file, or a damaged one ({first_line(error)}).") from error
    repeated = {"functions"} if model.functions else set()
    repeated |= _LOOPS & {node.op_type for node in _nodes(model)}
    if repeated:
        raise CheckpointError(
            f"{path}: its graph has {', '.join(sorted(repeated))}, which `vitkit export` never writes and which may "
            "never end. Export the model again."
        )
    return model


def _nodes(model: Any) -> Iterator[Any]:
    """Yield the nodes of an ONNX model's graph, and of the graphs of its branches and loops."""
    graphs = [model.graph]
    while graphs:
        for node in graphs.pop().node:
            yield node
            for attribute in node.attribute:
                graphs += [attribute.g] if attribute.HasField("g") else attribute.graphs


ONNX_FILES: Mapping[Runtime, Callable[[str | Path, Mapping[str, Any]], ExportedFile]] = {
    "onnxruntime": OnnxFile,
    "openvino": OpenVinoFile,
}
"""What runs an ONNX file -> the class that opens one."""


def require_file(path: str | Path) -> None:
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        raise CheckpointError(f"no file '{path}'.{nearest_file(Path(path))} Write it by `vitkit export`.")


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def _last_line(error: Exception) -> str:
    """Return the reason in an error of OpenVINO, whose lines before it name its source files."""
    return str(error).strip().splitlines()[-1][:200] if str(error).strip() else type(error).__name__


def select_inputs(file: ExportedFile, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs that a file takes.

    Raises:
        CheckpointError: it takes one that there is not.
    """
    for name in file.inputs:
        if name not in inputs:
            raise CheckpointError(
                f"{file.path}: damaged: it takes an input {name!r:.100}; the model has {', '.join(inputs)}. Export the "
                "model again."
            )
    return {name: inputs[name] for name in file.inputs}


def refusal(path: str | Path, inputs: Mapping[str, Tensor], reason: str) -> DataError:
    shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
    return DataError(f"{path}: cannot take {shapes} ({reason}).")
