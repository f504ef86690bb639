"""Adds the teacher to models that learn from one: finds it, loads it, and checks that it stays the same."""

import logging
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from vitkit.distributed import first_rank_first, world_size
from vitkit.engine.checkpointing import rng_state, set_rng_state
from vitkit.engine.preparation import Preparation, Start
from vitkit.errors import CheckpointError, VitkitError
from vitkit.protocols.learning import LearnsFromTeacher
from vitkit.protocols.model import Model
from vitkit.weights.contents import TEACHER
from vitkit.weights.reading import read_metadata
from vitkit.weights.teachers import find_teacher, load_teacher

logger = logging.getLogger("vitkit")
IMAGES_MEASURED = 256
"""Number of training images on which a teacher is measured."""


class Teaching(Preparation):
    """The frozen network of a model that learns from one.

    Raises:
        VitkitError: see `add_teacher`; or the run that is resumed was started with another network.
    """

    def __init__(self, model: Any, start: Start):
        super().__init__(model, start)
        with first_rank_first():
            if source := add_teacher(model, start.datasets["train"].classes):
                logger.info("teacher: weights from %s", source)
            key = f"{model.teacher_key():016x}"
            saved = read_metadata(start.checkpoint) if start.checkpoint else {}
        self.about = {TEACHER: key}
        if saved.get(TEACHER, key) != key:
            raise CheckpointError(
                f"{start.checkpoint}: learned from another teacher than {source or 'that'} is now (fingerprint of its "
                f"weights {saved[TEACHER]} in the run, {key} now). Put the teacher's weights back; to learn from the "
                "new ones, start a new run (--init takes the student's weights)."
            )

    @classmethod
    def is_needed(cls, model: Model, start: Start) -> bool:
        """Return whether the model learns from a teacher."""
        return isinstance(model, LearnsFromTeacher)

    def begin(self, model: Any) -> None:
        """Let the model measure its teacher on the first training images, whose order and transforms stay the same."""
        state = rng_state()
        self.start.loader.set_position(0)
        batch_size = self.start.data.batch_size_per_gpu * world_size()
        model.measure_teacher(islice(self.start.loader, -(-IMAGES_MEASURED // batch_size)))
        set_rng_state(state)


def add_teacher(model: nn.Module, classes: Sequence[str] | None) -> str | None:
    """Give a model the frozen network that its config names as `teacher`, with its weights; return where these came
    from, or None if it has none. To be called before the model's own weights are loaded.

    Args:
        classes: the dataset's classes.
    Raises:
        VitkitError: there is no such network, or it would have random weights, or others than the config says.
    """
    if not isinstance(model, LearnsFromTeacher) or model.teacher is None:
        return None
    try:
        teacher = find_teacher(model.teacher)
        with torch.random.fork_rng(devices=[]):  # a resumed run draws the same numbers, whatever its model starts from
            network = model.build_teacher(teacher.backbone)
        source = load_teacher(network, teacher, classes)
        model.take_teacher(network)
    except VitkitError as error:
        raise type(error)(f"model.teacher: {error}") from error
    return source
