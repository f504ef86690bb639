"""Training and testing from Python, equivalent to the command-line tools."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.apps.export_reading.settings import Runtime
from vitkit.apps.inference import Loaded, Tiling, find_trained, load
from vitkit.apps.inference.load import require_device
from vitkit.apps.inference.tiling import make_tiling
from vitkit.apps.inference.trained_classes import read_trained_classes
from vitkit.apps.interop.transformers_configs import check_architecture
from vitkit.apps.training.checking import DataWarnings
from vitkit.apps.training.process_group import close_distributed, init_distributed
from vitkit.apps.training.testing import Evaluation, evaluate_model
from vitkit.apps.visualization.curves import plot_training, read_log
from vitkit.apps.visualization.predictions import draw_predictions
from vitkit.config import Config, load_config, load_saved_config
from vitkit.data.loading.loader import leave_imported_main
from vitkit.data.loading.splits import Split
from vitkit.devices import default_device
from vitkit.distributed import first_rank_first, is_main
from vitkit.engine.hooks import Hook, Interrupted
from vitkit.engine.trainer import run_training
from vitkit.errors import ConfigError
from vitkit.logging import LOG_NAME, setup_logging
from vitkit.weights.loading import InitialWeights
from vitkit.weights.locate import LAST_NAME, RUN_CONFIG, find_run_weights, find_weights
from vitkit.weights.published import load_published_config

FIGURES: dict[str, Callable[..., Any]] = {"plot_training": plot_training, "draw_predictions": draw_predictions}
"""What draws the curves and the predictions of a run, as `run_training` takes it."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    path: Path
    """The run's folder."""
    metrics: dict[str, float]
    """Metrics of the last evaluation, by name."""
    history: list[dict[str, float]]
    """The metrics of each evaluation, in chronological order."""

    @property
    def weights(self) -> Path:
        """The checkpoint of the best evaluation, or of the last step without one."""
        return find_run_weights(self.path)

    def load(self, *, device: str | torch.device = "cpu") -> Loaded:
        """Load these weights for prediction; see `vitkit.load`."""
        return load(self.path, device=device)


def train(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    init: str | Path | None = None,
    init_partial: str | Path | None = None,
    class_map: Mapping[str, str] | None = None,
    device: str | None = None,
    trust: bool = False,
    verbose: bool = False,
    hooks: Sequence[Hook] = (),
    **overrides: Any,
) -> Run:
    """Train a model, as `vitkit train` does; under torchrun every process must call it.

    `train("quickstart/dino", train=dict(epochs=2), data=dict(num_workers=0))`

    Args:
        config: a file, the name of an installed config, or the result of `load_config`. Not needed with `resume`.
        run_dir: the folder to write to; None: runs/CONFIG_NAME, numbered if it exists.
        resume: the folder of a run to resume.
        init: weights to start from, see `find_weights`. Of class heads, the rows of classes that the data has by the
            same name are taken, whatever their order, case, blanks, hyphens and underscores; those of others are new.
        init_partial: the same for a model that differs by a layer: what fits is taken, and a table of it logged.
        class_map: {OLD: NEW}, the names in the data of classes that the weights to start from name otherwise; of
            several classes that become one, the mean is taken.
        device: "cpu", "cuda", "mps", ...; None: an accelerator if there is one.
        trust: allow a saved config to import the code that it names, see `load_config`.
        verbose: print all loss terms and metrics, as in console.txt.
        hooks: objects that take part in the run, in addition to those of train.hooks; they are not saved with it.
        overrides: values of the config: for each section a dict of the values to change, or a `dict(type=...)` that
            replaces the section; or by dotted key: `**{"model.num_queries": 50}`.
    Raises:
        VitkitError: an error that a user can cause, see vitkit/errors.py.
        KeyboardInterrupt: ctrl-C was pressed; the state is saved, and `resume` continues from it.
    """
    if (config is None) == (resume is None):
        raise ConfigError("train: give either a config, or resume=RUN.")
    if init is not None and init_partial is not None:
        raise ConfigError("train: init and init_partial are both weights to start from: give one.")
    start = init if init_partial is None else init_partial
    if class_map and start is None:
        raise ConfigError("train: class_map names classes of weights to start from: give init too.")
    if resume is not None and (start is not None or run_dir is not None):
        raise ConfigError("train: resume continues a run in its own folder: it takes neither init nor run_dir.")
    if resume is not None:
        check_resumable(Path(resume))
        config = Path(resume) / RUN_CONFIG
    assert config is not None
    resolved = _resolve(config, as_overrides(overrides), trust=trust)
    with process_group(device, verbose=verbose) as rank_device:
        try:
            folder = run_training(
                resolved,
                rank_device,
                default=Path("runs") / resolved.name,
                run_dir=None if run_dir is None else Path(run_dir),
                resume=None if resume is None else Path(resume),
                init=find_start(start, partial=init_partial is not None, class_map=class_map),
                trust=trust,
                hooks=[DataWarnings(), *hooks],
                **FIGURES,
            )
        except Interrupted as interrupted:
            if interrupted.signal == signal.SIGINT:  # a notebook keeps running, whereas SystemExit would end it
                raise KeyboardInterrupt(str(interrupted)) from interrupted
            raise
    _, evaluations = read_log(folder / LOG_NAME)
    history = [dict(evaluation["metrics"]) for evaluation in evaluations]
    return Run(folder, history[-1] if history else {}, history)


def test(
    model: str | Path | Mapping[str, Any],
    weights: str | Path | None = None,
    *,
    out: str | Path | None = None,
    tiles: int | Tiling | None = None,
    split: Split = "val",
    device: str | None = None,
    runtime: Runtime = "onnxruntime",
    trust: bool = False,
    **overrides: Any,
) -> Evaluation:
    """Evaluate a model on its config's validation data, as `vitkit test` does; under torchrun every process must call
    it.

    `test("runs/detr").metrics["bbox/AP"]`, `test("detr_r50", data=dict(root="data/coco"))`

    Args:
        model: see `find_model`.
        weights: weights for the config; None: those of `model`.
        out: a file to write the predictions to; None: they are not written.
        tiles: predict images in tiles of this many pixels, see `Tiling`.
        split: "val", "test" or "train".
        runtime: what runs an ONNX file; OpenVINO ("openvino") only on the CPU.
        device, trust, overrides: see `train`.
    Raises:
        VitkitError: an error that a user can cause, see vitkit/errors.py.
    """
    texts = as_overrides(overrides)
    if isinstance(model, Mapping):
        model, texts = _resolve(model, texts, trust=trust), []
    config, located = find_trained(model, weights, overrides=texts, trust=trust)
    with process_group(device) as rank_device:
        tiling = make_tiling(tiles)
        result = evaluate_model(config, located, rank_device, tiling=tiling, split=split, runtime=runtime)
        if out is not None and is_main():
            result.write(out)
    return result


def find_start(
    init: str | Path | None, *, partial: bool = False, class_map: Mapping[str, str] | None = None
) -> InitialWeights | None:
    """Find the weights that a run starts from, see `InitialWeights`; all ranks must call it. A repository of the hub is
    refused before its weights are downloaded if vitkit has no model of its kind."""
    with first_rank_first():
        if init is None:
            return None
        weights, names = find_weights(init, check=check_architecture), None
        if weights.kind == "published":
            names = read_trained_classes(weights.metadata, str(weights), load_published_config(weights.name)).classes
        return InitialWeights(weights, partial, dict(class_map or {}), names)


def _resolve(source: str | Path | Mapping[str, Any], overrides: list[str], *, trust: bool) -> Config:
    if callable(source):
        raise ConfigError(f"config: got the function or class {source!r:.100}; expected what it returns.")
    if not isinstance(source, Mapping):
        return load_config(source, overrides, trust=trust)
    # Values that are passed directly come from the caller's own program, and are therefore trusted.
    path = source.path if isinstance(source, Config) else "config"
    return load_saved_config(json.dumps(_plain(source), default=_refuse), path, overrides, trust=True)


def _plain(value: Any) -> Any:
    """Return a value with NumPy's numbers and paths as Python's numbers and texts."""
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value


def _refuse(value: Any) -> None:
    raise ConfigError(f"config: has a {type(value).__name__}, {value!r:.100}; expected numbers, texts, lists, dicts.")


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Write keyword arguments as `key.sub=value`; a dict without `type` changes only the keys that it has, unless it is
    a value with dotted names, such as `optimizer.lr_multipliers`."""
    overrides = []
    for key, value in values.items():
        has_dotted_names = "." in key and isinstance(value, Mapping) and any("." in str(name) for name in value)
        if isinstance(value, Mapping) and "type" not in value and not has_dotted_names:
            overrides += as_overrides({f"{key}.{name}": item for name, item in value.items()})
        else:
            value = _plain(value)
            overrides.append(f"{key}={value if isinstance(value, str) else repr(value)}")
    return overrides


@contextmanager
def process_group(device: str | None, *, verbose: bool = False) -> Iterator[torch.device]:
    """Join the other ranks, if there are any, and yield this rank's device."""
    leave_imported_main()
    try:
        if device is not None:
            require_device(device)
        rank_device = init_distributed(str(device or default_device()))
        setup_logging(verbose=verbose)
        yield rank_device
    finally:
        close_distributed()


def check_resumable(run_dir: Path) -> None:
    """Raise an error unless a folder holds a config and a checkpoint.

    Raises:
        ConfigError: one of them is missing.
    """
    missing = [] if (run_dir / RUN_CONFIG).is_file() else [RUN_CONFIG]
    missing += [] if (run_dir / LAST_NAME).is_file() or any(run_dir.glob("step_*.pth")) else [LAST_NAME]
    if missing:
        raise ConfigError(
            f"--resume {run_dir}: contains no run to resume (no {missing[0]}). Pass a run's folder; start a run that "
            "was stopped before its first checkpoint anew, without --resume."
        )
