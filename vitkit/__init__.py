"""vitkit: dense prediction with transformers in plain PyTorch."""

# Importing a package registers what it holds.
from vitkit import backbones, data, engine, evaluation, heads, losses, matchers, models, necks, seq2seq  # noqa: F401
from vitkit.checkpoint import LoadReport, load_weights
from vitkit.config import Config, load_config
from vitkit.data.loader import build_dataset
from vitkit.errors import CheckpointError, ConfigError, DataError, TrainingError, VitkitError
from vitkit.models import build_model
from vitkit.nn.attention import AttentionRecorder
from vitkit.registry import (
    BACKBONES,
    CRITERIA,
    DATASETS,
    EVALUATORS,
    HEADS,
    MATCHERS,
    MODELS,
    NECKS,
    OPTIMIZERS,
    SCHEDULES,
    SECTIONS,
    TRANSFORMS,
)

__all__ = [
    "BACKBONES",
    "CRITERIA",
    "DATASETS",
    "EVALUATORS",
    "HEADS",
    "MATCHERS",
    "MODELS",
    "NECKS",
    "OPTIMIZERS",
    "SCHEDULES",
    "SECTIONS",
    "TRANSFORMS",
    "AttentionRecorder",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "LoadReport",
    "TrainingError",
    "VitkitError",
    "build_dataset",
    "build_model",
    "load_config",
    "load_weights",
]
