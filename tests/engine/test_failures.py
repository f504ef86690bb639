"""Steps whose losses or gradients are not finite, and memory that runs out."""

import logging
import math
import signal
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.toy_training import CPU, Batches, Regression, SquaredError, records, run
from torch import nn

from vitkit.engine.checkpointing import Progress
from vitkit.engine.evaluate import evaluate
from vitkit.engine.failures import explain_out_of_memory, training_remedies
from vitkit.engine.settings import TrainSettings
from vitkit.engine.step import Decision, StepGuard
from vitkit.errors import TrainingError
from vitkit.evaluation.text import LanguageModelEvaluator
from vitkit.protocols.evaluator import Evaluator
from vitkit.structures import Batch
from vitkit.weights import read_checkpoint
from vitkit.weights.locate import LAST_NAME


class Poisoned(Batches):
    """Batches of which those numbered `bad` (from 0) in each epoch contain nan."""

    def __init__(self, *bad):
        super().__init__()
        self.bad = bad

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            for position, target in enumerate(batch.targets):
                target["image_id"] = 100 * number + position
            if number in self.bad:
                batch.inputs["images"] = batch.inputs["images"] * math.nan
            yield batch


def test_step_with_a_non_finite_loss_is_skipped_and_its_images_are_named(tmp_path, caplog):
    model, progress = run(tmp_path / "run", loader=Poisoned(2), epochs=2)
    assert progress.step == 14 and progress.bad_in_a_row == 0
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert all(math.isfinite(record["loss"]) for record in records(tmp_path / "run", "train"))
    message = "step after step 2 (epoch 0, batch 3) is skipped, 1 in a row so far: loss squared, absolute is nan"
    assert message in caplog.text and "image 200, 201, 202, 203. After 5" in caplog.text


def test_training_after_a_skipped_step_equals_training_without_that_batch(tmp_path):
    class Without(Batches):
        def __len__(self):
            return 7

        def __iter__(self):
            return (batch for number, batch in enumerate(super().__iter__()) if number != 7)

    def train_on(loader, folder):
        torch.manual_seed(0)
        model = Regression()
        model.layers[2].p = 0.0
        return run(tmp_path / folder, loader=loader, epochs=1, model=model)[0]

    skipped, without = train_on(Poisoned(7), "skipped"), train_on(Without(), "without")
    for a, b in zip(skipped.parameters(), without.parameters()):
        assert a.equal(b)


def test_skipped_step_does_not_change_running_statistics(tmp_path):
    model = Regression()
    model.layers.insert(0, nn.BatchNorm1d(4))
    run(tmp_path / "run", loader=Poisoned(7), epochs=1, model=model)
    saved = read_checkpoint(tmp_path / "run" / LAST_NAME)["model"]
    assert saved["layers.0.num_batches_tracked"] == 7 and saved["layers.0.running_mean"].isfinite().all()


def test_the_step_that_ends_a_run_does_not_change_running_statistics(tmp_path):
    model = Regression()
    model.layers.insert(0, nn.BatchNorm1d(4))
    with pytest.raises(TrainingError, match="5 steps in a row were skipped"):
        run(tmp_path / "run", loader=Poisoned(*range(3, 8)), epochs=1, model=model)
    assert model.layers[0].num_batches_tracked == 3 and model.layers[0].running_mean.isfinite().all()


def test_five_failed_steps_in_a_row_end_the_run_and_keep_the_previous_checkpoint(tmp_path):
    with pytest.raises(
        TrainingError, match=r"loss squared, absolute is nan; image 700, .* 5 steps in a row were skipped"
    ):
        run(tmp_path / "run", loader=Poisoned(*range(-1, 4)), epochs=1)  # four: not yet
        run(tmp_path / "other", loader=Poisoned(*range(3, 8)), epochs=1, save_every_steps=1)
    saved = read_checkpoint(tmp_path / "other" / LAST_NAME)
    assert saved["progress"]["step"] == 3
    assert all(value.isfinite().all() for value in saved["model"].values())


def test_consecutive_failed_steps_are_counted_across_a_resume(tmp_path):
    with pytest.raises(TrainingError, match="5 steps in a row were skipped"):
        run(tmp_path / "run", loader=Poisoned(6, 7), epochs=1)
        run(tmp_path / "run", loader=Poisoned(0, 1, 2), epochs=2, resume=tmp_path / "run" / LAST_NAME)


def test_error_names_the_bad_batch_of_an_accumulated_step(tmp_path, caplog):
    _, progress = run(tmp_path / "run", loader=Poisoned(2), epochs=1, accumulate=2)
    assert progress.step == 3
    messages = "\n".join(caplog.messages)
    assert "image 200, 201, 202, 203. After" in messages and "300" not in messages


class Exploding(SquaredError):
    """A finite loss with non-finite gradients: those of the square root at zero."""

    def forward(self, outputs, targets):
        losses = super().forward(outputs, targets)
        return {**losses, "root": (outputs["value"] * 0).sqrt().sum()}


def test_step_with_a_non_finite_gradient_is_skipped_and_its_parameters_are_named(tmp_path, caplog):
    with pytest.raises(TrainingError, match=r"the gradient norm of layers\.0\.weight, .* and 1 others is nan; image"):
        run(tmp_path / "run", criterion=Exploding(), loader=Poisoned())
    assert "4 in a row so far" in caplog.text


def decide(norm, progress=None, *, scale=None, stop_signal=None, save=False):
    """Return the decision about a step with a finite loss and a gradient norm."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    scaler.scale(torch.zeros(()))  # makes the scale
    checkpoints = SimpleNamespace(saved_at=time.monotonic())
    guard = StepGuard(nn.Linear(1, 1), scaler, checkpoints, save_every_minutes=0 if save else None)
    guard.stop_signal = stop_signal
    return guard.decide([{"a": torch.tensor(1.0)}], [[{}]], torch.tensor(norm), progress or Progress())


def test_too_high_fp16_scale_is_lowered_without_counting_as_a_failure():
    progress = Progress()
    for scale, expected in ((2.0**16, 0), (2.0, 0), (1.0, 1), (0.5, 2)):
        assert not decide(math.inf, progress, scale=scale).take and progress.bad_in_a_row == expected


@pytest.mark.parametrize("norm", [1.0, math.nan])
def test_saving_and_stopping_are_decided_also_if_the_step_is_skipped(norm):
    assert decide(norm, stop_signal=signal.SIGTERM) == Decision(take=norm == 1.0, save=False, stop=True)
    assert decide(norm, save=True) == Decision(take=norm == 1.0, save=True, stop=False)


def test_gradients_that_overflow_at_every_scale_end_the_run(tmp_path):
    with pytest.raises(TrainingError, match="5 steps in a row were skipped"):
        run(tmp_path / "run", criterion=Exploding(), loader=Poisoned(), precision="fp16")
    # 2^16 is halved 16 times; after that, the loss scale no longer explains the overflow.


def explained(batch, **settings):
    return explain_out_of_memory(batch, partial(training_remedies, settings=TrainSettings(epochs=1, **settings)))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
)
def test_out_of_memory_names_the_batch_and_memory_savings(error):
    labels = [{"labels": torch.zeros(n, dtype=torch.int64), "image_id": 10 + n} for n in (3, 40)]
    batch = Batch({"images": torch.zeros(2, 3, 8, 16)}, labels)
    with pytest.raises(TrainingError) as caught, explained(batch):
        raise error
    message = str(caught.value)
    assert "batch of images 2x3x8x16 with 3 + 40 objects, image 13, 50 (" in message
    for setting in ("data.images_per_gpu", "train.accumulate", "precision=bf16", "activation_checkpointing=true"):
        assert setting in message
    with pytest.raises(TrainingError) as caught, explained(batch, precision="bf16"):
        raise error
    assert "precision" not in str(caught.value)


def test_out_of_memory_in_the_optimizers_step_is_explained_too(tmp_path, monkeypatch):
    def step(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(torch.optim.AdamW, "step", step)  # the optimizer allocates its state there
    with pytest.raises(TrainingError, match="out of memory at a batch of images 4x4"):
        run(tmp_path / "run")


def test_out_of_memory_in_evaluation_names_the_image_and_memory_savings():
    class Hungry(nn.Module):
        def forward(self, images):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    batch = Batch({"images": torch.zeros(1, 3, 8, 16)}, [{"image_id": 17}])
    with pytest.raises(TrainingError) as caught:
        evaluate(Hungry(), [batch], LanguageModelEvaluator([0]), device=CPU)
    assert "batch of images 1x3x8x16, image 17 (CUDA out of memory" in str(caught.value)
    assert "data.val.transforms" in str(caught.value) and "accumulate" not in str(caught.value)


def test_other_errors_are_raised_unchanged():
    with pytest.raises(RuntimeError, match="shapes"), explained(Batch({}, [])):
        raise RuntimeError("shapes do not fit")


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level(logging.INFO, logger="vitkit")


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_evaluation_restores_modes_and_meters(is_training, fails):
    class Plain(Evaluator):
        def update(self, predictions, targets):
            assert not model.training and not criterion.training
            if fails:
                raise ZeroDivisionError

        def gather(self):
            pass

        def compute(self):
            return {}

        def table(self):
            return ""

    class Targets(Batches):
        def __iter__(self):
            for batch in super().__iter__():
                yield Batch(batch.inputs, [target | {"original_size": (1, 1)} for target in batch.targets])

    model, criterion = Regression().train(is_training), SquaredError().train(not is_training)
    model.postprocess = lambda outputs, sizes: []
    criterion.meters["close"].add(torch.tensor(3), torch.tensor(4))
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        evaluate(model, Targets(), Plain(), device=CPU, criterion=criterion)
    assert model.training == is_training and criterion.training == (not is_training)
    assert criterion.meters["close"].compute(CPU) == (0.75, 4)
