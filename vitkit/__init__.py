"""vitkit: dense prediction with transformers in plain PyTorch.

The public names below are imported when they are first used, so that `vitkit --help` need not wait for torch.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from vitkit.apps.analysis.reports.api import analyze
    from vitkit.apps.conversion.convert import convert
    from vitkit.apps.doctor import diagnose
    from vitkit.apps.explanations.api import explain
    from vitkit.apps.explanations.explain_options import Explanation
    from vitkit.apps.export_writing.export import export
    from vitkit.apps.inference.load import load
    from vitkit.apps.pretraining.pretrain import pretrain
    from vitkit.apps.reproduction.measuring import reproduce
    from vitkit.apps.starter.start import start
    from vitkit.apps.training.api import test, train
    from vitkit.apps.training.comparing import compare
    from vitkit.config import Config, load_config
    from vitkit.data.loading.splits import build_dataset
    from vitkit.engine.build import build_model
    from vitkit.errors import CheckpointError, ConfigError, DataError, TrainingError, VitkitError
    from vitkit.matchers.base import Matcher
    from vitkit.nn.attention import AttentionRecorder
    from vitkit.protocols.criterion import Criterion
    from vitkit.protocols.dataset import Dataset
    from vitkit.protocols.evaluator import Evaluator
    from vitkit.protocols.model import Model
    from vitkit.registry import (
        BACKBONES,
        CRITERIA,
        DATASETS,
        EVALUATORS,
        HEADS,
        HOOKS,
        MATCHERS,
        MODELS,
        NECKS,
        OPTIMIZERS,
        SCHEDULES,
        SECTIONS,
        TRANSFORMS,
    )
    from vitkit.weights import LoadReport, load_weights

_REGISTRIES = (
    "BACKBONES CRITERIA DATASETS EVALUATORS HEADS HOOKS MATCHERS MODELS NECKS OPTIMIZERS SCHEDULES SECTIONS TRANSFORMS"
)
_MODULES = dict.fromkeys(_REGISTRIES.split(), "registry") | {
    "AttentionRecorder": "nn.attention",
    "CheckpointError": "errors",
    "Config": "config",
    "ConfigError": "errors",
    "Criterion": "protocols.criterion",
    "DataError": "errors",
    "Dataset": "protocols.dataset",
    "Evaluator": "protocols.evaluator",
    "Explanation": "apps.explanations.api",
    "LoadReport": "weights",
    "Matcher": "matchers.base",
    "Model": "protocols.model",
    "TrainingError": "errors",
    "VitkitError": "errors",
    "analyze": "apps.analysis.reports.api",
    "build_dataset": "data.loading.splits",
    "build_model": "engine.build",
    "compare": "apps.training.comparing",
    "convert": "apps.conversion.convert",
    "diagnose": "apps.doctor",
    "explain": "apps.explanations.api",
    "export": "apps.export_writing.export",
    "load": "apps.inference",
    "load_config": "config",
    "load_weights": "weights",
    "pretrain": "apps.pretraining.pretrain",
    "reproduce": "apps.reproduction.measuring",
    "start": "apps.starter.start",
    "test": "apps.training.api",
    "train": "apps.training.api",
}
"""Public name -> the module that defines it."""

__all__ = ["__version__", *_MODULES]


class _CloneFinder:
    """Finds configs, model_zoo and tools as parts of the package in a clone, where they stand beside it."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        beside = name in ("vitkit.configs", "vitkit.model_zoo", "vitkit.tools")
        return PathFinder.find_spec(name, [str(Path(__file__).parents[1])]) if beside else None


sys.meta_path.append(_CloneFinder)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'vitkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"vitkit.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
