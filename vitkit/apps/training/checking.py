"""Checks a config as far as a training goes before its first step, and what training data do not go with."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vitkit.apps.datasets.mirroring import UNPAIRED, find_mirrored_texts, has_unpaired_points
from vitkit.apps.datasets.object_counts import describe_few_queries, model_argument
from vitkit.config.load import Config
from vitkit.config.paths import make_data_paths_absolute
from vitkit.distributed import is_main
from vitkit.engine.hooks import Hook, default_hooks
from vitkit.engine.run import TrainRun
from vitkit.engine.run_folder import RunFolder
from vitkit.engine.settings import require
from vitkit.engine.trainer import REQUIRED, build_run, choose_precision
from vitkit.logging import print_line
from vitkit.weights.loading import InitialWeights

logger = logging.getLogger("vitkit")


class DataWarnings(Hook):
    """Warns of images with more objects than the model has queries, and of what flipped images make wrong: texts that
    say left or right, and keypoints without pairs."""

    @contextmanager
    def during_training(self, run: TrainRun) -> Iterator[None]:
        """Warn once, before the first step."""
        dataset = run.loader.dataset
        if is_main() and (texts := find_mirrored_texts(dataset)):
            logger.warning(
                "data.train.transforms: flip images, which makes texts such as %s wrong. Set flip_probability=0.0, or "
                "leave HorizontalFlip out.",
                " and ".join(map(repr, texts)),
            )
        if is_main() and has_unpaired_points(dataset):
            logger.warning("data.train: %s.", UNPAIRED)
        num_queries = model_argument(json.loads(run.saved_with["config"])["model"], "num_queries")
        if is_main() and (message := describe_few_queries(dataset.objects_per_image(), num_queries)):
            logger.warning("data.train: %s.", message)
        yield


def check_training(config: Config, device: torch.device, *, init: InitialWeights | None = None) -> None:
    """Build the parts of a config and check them on the first batch, as `run_training` does; write and train nothing.

    Raises:
        VitkitError: an error that a user can cause, such as a part that lacks what another one needs.
    """
    require(config, *REQUIRED)
    make_data_paths_absolute(config)
    choose_precision(config, None, device)
    folder = RunFolder(Path("(not written)"), checkpoint=None, lock=None)
    run, _ = build_run(config, folder, device, init=init)
    default_hooks(run.settings)
    with DataWarnings().during_training(run):
        pass
    print_line("checked: every part has what the others ask of it, and a first batch was evaluated")
