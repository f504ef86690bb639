"""Configs: plain Python files that return nested dicts, checked completely before anything is built from them."""

from vitkit.config.check import check_config, reads_root
from vitkit.config.load import Config, cfg_diff, load_config, load_saved_config, save_config, value_at
from vitkit.config.names import config_names, find_config
from vitkit.config.overrides import with_overrides
from vitkit.config.paths import make_data_paths_absolute

__all__ = [
    "Config",
    "cfg_diff",
    "check_config",
    "config_names",
    "find_config",
    "load_config",
    "load_saved_config",
    "make_data_paths_absolute",
    "reads_root",
    "save_config",
    "value_at",
    "with_overrides",
]
