"""Checks a config as far as a training goes before its first step."""

from pathlib import Path

import torch

from vitkit.config.load import Config
from vitkit.config.paths import make_data_paths_absolute
from vitkit.engine.hooks import default_hooks
from vitkit.engine.run_folder import RunFolder
from vitkit.engine.settings import require
from vitkit.engine.trainer import REQUIRED, build_run, choose_precision
from vitkit.logging import print_line
from vitkit.weights.locate import Located


def check_training(
    config: Config, device: torch.device, *, init: Located | None = None, partial_init: bool = False
) -> None:
    """Build the parts of a config and check them on the first batch, as `run_training` does; write and train nothing.

    Raises:
        VitkitError: an error that a user can cause, such as a part that lacks what another one needs.
    """
    require(config, *REQUIRED)
    make_data_paths_absolute(config)
    choose_precision(config, None, device)
    folder = RunFolder(Path("(not written)"), checkpoint=None, lock=None)
    run, _ = build_run(config, folder, device, init=init, partial_init=partial_init)
    default_hooks(run.settings)
    print_line("checked: every part has what the others ask of it, and a first batch was evaluated")
