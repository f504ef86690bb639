"""The settings of an export, which `vitkit export --help` lists without importing PyTorch."""

from dataclasses import dataclass
from typing import Literal, get_args

from vitkit.errors import ConfigError

ONNX_SUFFIX, PROGRAM_SUFFIX = ".onnx", ".pt2"
FORMATS = {"onnx": ONNX_SUFFIX, "torch": PROGRAM_SUFFIX}
"""Format -> the extension of its files."""
Runtime = Literal["onnxruntime", "openvino"]
"""What runs an ONNX file: ONNX Runtime, or OpenVINO."""
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
OPSETS = range(18, 24)
TOLERANCES = {"fp32": 1e-3, "fp16": 5e-2, "int8": 0.5}
"""Precision -> the largest tolerated difference from the model in float32, relative to the largest absolute value if
that is above 1."""


@dataclass(frozen=True)
class ExportSettings:
    """The kind of file to write.

    Raises:
        ConfigError: a value is unknown or out of range, or the settings exclude each other.
    """

    format: Literal["onnx", "torch"] = "onnx"
    precision: Literal["fp32", "fp16", "int8"] = "fp32"
    """fp16 stores weights and computes in float16; int8 computes matrix products with weights in int8, in ONNX files
    only."""
    size: tuple[int, int] | None = None
    """Height and width of all images in pixels; None: any size."""
    opset: int = 20
    """The ONNX operator set; ONNX files only."""
    tolerance: float | None = None
    """The largest tolerated difference from the model; None: that of `TOLERANCES`."""
    overwrite: bool = False
    """Replace existing files."""

    def __post_init__(self) -> None:
        for name, choices in (("format", FORMATS), ("precision", TOLERANCES)):
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"export: got {name} {value!r}; expected {', '.join(choices)}.")
        if self.precision == "int8" and self.format != "onnx":
            raise ConfigError(f"export: precision int8 needs format onnx; got {self.format}.")
        if self.size is not None and (
            not isinstance(self.size, tuple | list) or [type(side) for side in self.size] != [int, int]
        ):
            raise ConfigError(f"export: got size {self.size!r}; expected (height, width).")
        if self.size is not None and min(self.size) < 1:
            raise ConfigError(f"export: got size {self.size[0]}x{self.size[1]}; expected 1x1 or more.")
        if self.opset not in OPSETS:
            raise ConfigError(f"export: got opset {self.opset}; expected {OPSETS[0]} to {OPSETS[-1]}.")
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ConfigError(f"export: got tolerance {self.tolerance:g}; expected 0 or more.")
