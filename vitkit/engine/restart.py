"""Restarts from the best weights when a run's last part begins, with a new moving average."""

import math
from collections.abc import Mapping

from torch import Tensor

from vitkit.distributed import broadcast_object, is_main
from vitkit.engine.parallel import load_from_main
from vitkit.engine.run import TrainRun
from vitkit.errors import CheckpointError
from vitkit.logging import print_line
from vitkit.weights import read_checkpoint
from vitkit.weights.locate import BEST_NAME


def restore_average(run: TrainRun) -> None:
    """Continue a resumed run's average at the step in its progress."""
    progress, settings = run.progress, run.settings
    decay = settings.restart_ema_decay if progress.restart_step else None
    run.ema.continue_at(progress.step - progress.restart_step, settings.ema_decay if decay is None else decay)


def restart_from_best(run: TrainRun) -> None:
    """Continue from the best weights so far, with a new moving average of them, and save that state.

    The optimizer and the schedule continue as they are. All ranks must call it.

    Raises:
        CheckpointError: there is no best.pth of this part of the run, or the state cannot be saved.
    """
    progress = run.progress
    failure = best = None
    if is_main():
        try:
            best = _best_weights(run)
        except CheckpointError as error:
            failure = str(error)
    failure, has_best = broadcast_object((failure, best is not None))
    if failure:
        raise CheckpointError(failure)
    if has_best:
        load_from_main(run.model, best)
    else:
        run.model.load_state_dict(run.ema.module.state_dict())
    run.ema.module.load_state_dict(run.model.state_dict())
    progress.restart_step, progress.worse_in_a_row = progress.step, 0
    restore_average(run)
    # Before best.pth can be replaced: a run that is killed before its next save would restart from other weights.
    run.checkpoints.save(progress, raise_on_error=True)


def _best_weights(run: TrainRun) -> Mapping[str, Tensor] | None:
    """Return the best weights so far; None for the average, if none could be measured. Raise a CheckpointError if there
    is no best.pth of this part of the run."""
    path, epoch, progress = run.run_dir / BEST_NAME, run.progress.epoch, run.progress
    if not path.is_file() and progress.best_metric == run.settings.best_metric and progress.best == -math.inf:
        print_line(
            f"epoch {epoch + 1} continues from the average of the weights so far: {progress.best_metric} could not be "
            "measured, so none are the best"
        )
        return None
    if not path.is_file():
        raise CheckpointError(
            f"{path}: does not exist, and train.restart_epoch={epoch} continues from it. Expected "
            f"train.best_metric={run.settings.best_metric} among the metrics of an earlier evaluation: resume with "
            "another one, or with train.restart_epoch=none."
        )
    best = read_checkpoint(path)
    best_epoch = best["progress"]["epoch"]
    if best_epoch > epoch:
        raise CheckpointError(
            f"{path}: is from epoch {best_epoch}, but train.restart_epoch={epoch} continues from the best one before. "
            "Resume from a later checkpoint, or with train.restart_epoch=none."
        )
    print_line(f"epoch {epoch + 1} continues from the weights of epoch {best_epoch}, the best so far")
    return best["model"]
