import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.clocks import Clock
from helpers.toy_training import CPU, Batches, Regression, SquaredError, records, run
from helpers.weights import assert_same_weights

from vitkit.config import load_config
from vitkit.engine.hooks import EndAfter, Hook
from vitkit.engine.run import TrainRun
from vitkit.engine.settings import TrainSettings
from vitkit.engine.trainer import describe, fit, seed_everything
from vitkit.errors import CheckpointError, ConfigError, TrainingError
from vitkit.losses.matched import MatchedCriterion
from vitkit.registry import CRITERIA, SCHEDULES
from vitkit.structures import Batch
from vitkit.weights import read_checkpoint
from vitkit.weights.locate import BEST_NAME, LAST_NAME, RUN_WEIGHTS


def test_training_lowers_the_loss_and_logs_it(tmp_path):
    _, progress = run(tmp_path / "run")
    steps = records(tmp_path / "run", "train")
    assert progress.step == 32 and [r["step"] for r in steps] == list(range(4, 33, 4))
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert steps[0]["loss"] == pytest.approx(sum(steps[0]["losses"].values()))
    assert {"lr", "it_s", "data_share", "memory_mb", "epoch"} <= steps[0].keys()
    assert 0 <= steps[0]["data_share"] <= 1


@pytest.mark.parametrize(
    ("classes", "text"), [(None, "2 validation images  "), (["a"], "validation images, 1 class  ")]
)
def test_first_line_names_the_classes_if_there_are_any(classes, text):
    class Images(list):
        noun = "images"

        def training_indices(self):
            return range(len(self))

    data = Images([0, 1])
    data.classes = classes
    state = SimpleNamespace(run_dir="run", parameters=[], device=CPU, settings=TrainSettings(epochs=1))
    assert text in describe(state, data, data, {})


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}, {"precision": "fp16"}, {"accumulate": 2}])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, options):
    whole, _ = run(tmp_path / "whole", **options)
    run(tmp_path / "parts", **{**options, "epochs": 2})
    resumed, progress = run(tmp_path / "parts", resume=tmp_path / "parts" / LAST_NAME, **options)
    assert progress.epoch == 4
    assert_same_weights(resumed, whole)
    a, b = (read_checkpoint(tmp_path / name / LAST_NAME) for name in ("whole", "parts"))
    assert a.keys() == b.keys() and ("ema" in a) == ("ema_decay" in options)
    assert all(torch.equal(a["ema"][k], b["ema"][k]) for k in a.get("ema", {}))


class PowerFailure(Exception):
    pass


class FailingBatches(Batches):
    """Fails before the batch with this number over all epochs."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def __iter__(self):
        for k, batch in enumerate(super().__iter__(), start=8 * self.epoch + self.batch):
            if k == self.number:
                raise PowerFailure
            yield batch


def test_run_resumes_exactly_after_a_failure_at_any_step(tmp_path):
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    wholes = {}

    # Deterministic, and with different folders for each example.
    @hypothesis.settings(derandomize=True, deadline=None, max_examples=12, database=None)
    @hypothesis.given(
        failures=st.lists(st.integers(1, 31), min_size=1, max_size=2, unique=True).map(sorted),
        accumulate=st.sampled_from([1, 2]),
        save_every_steps=st.integers(1, 3),
    )
    def check(failures, accumulate, save_every_steps):
        options = dict(accumulate=accumulate, ema_decay=0.9, save_every_steps=save_every_steps)
        if accumulate not in wholes:
            wholes[accumulate] = run(tmp_path / f"whole-{accumulate}", **options)[0].state_dict()
        folder = tmp_path / f"{failures}-{accumulate}-{save_every_steps}"
        for number in failures:
            resume = folder / LAST_NAME if (folder / LAST_NAME).exists() else None
            with pytest.raises(PowerFailure):
                run(folder, loader=FailingBatches(number), resume=resume, **options)
        resume = folder / LAST_NAME if (folder / LAST_NAME).exists() else None
        resumed, progress = run(folder, resume=resume, **options)
        assert progress.epoch == 4
        assert_same_weights(resumed, wholes[accumulate])

    check()


@pytest.mark.parametrize(
    "schedule",
    [
        dict(type="CosineLR"),
        dict(type="PolyLR"),
        dict(type="PolyLR", warmup_steps=0),
        dict(type="FlatCosineLR", flat_until_share=0.25),
    ],
    ids=["cosine", "poly", "poly without warm-up", "flat, then cosine"],
)
@pytest.mark.parametrize("epochs", [3, 8])
def test_schedule_of_another_number_of_epochs_continues_at_the_same_step(tmp_path, schedule, epochs):
    run(tmp_path / "whole", epochs=epochs, schedule=dict(schedule, epochs=epochs))
    run(tmp_path / "parts", epochs=2, schedule=dict(schedule, epochs=4))
    run(tmp_path / "parts", epochs=epochs, schedule=dict(schedule, epochs=epochs), resume=tmp_path / "parts/last.pth")
    rates, wanted = ([record["lr"] for record in records(tmp_path / name, "train")] for name in ("parts", "whole"))
    assert rates[4:] == pytest.approx(wanted[4:]) and rates[3] != pytest.approx(wanted[3])


@pytest.mark.parametrize("kind", ["OneCycleLR", "CosineAnnealingWarmRestarts"])
def test_a_schedule_of_pytorchs_follows_another_number_of_epochs(tmp_path, kind, monkeypatch):
    def own(optimizer, *, epochs, steps_per_epoch, warmup_steps):
        steps = epochs * steps_per_epoch
        if kind == "OneCycleLR":
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=steps)

    monkeypatch.setattr(SCHEDULES, "_constructors", SCHEDULES._constructors | {"OwnLR": own})
    run(tmp_path / "whole", epochs=4, schedule=dict(type="OwnLR", epochs=4))
    run(tmp_path / "parts", epochs=2, schedule=dict(type="OwnLR", epochs=2))
    longer = dict(type="OwnLR", epochs=4)
    run(tmp_path / "parts", epochs=4, schedule=longer, resume=tmp_path / "parts/last.pth")
    rates, wanted = ([record["lr"] for record in records(tmp_path / name, "train")] for name in ("parts", "whole"))
    assert rates[4:] == pytest.approx(wanted[4:]) and rates[3] != pytest.approx(wanted[3])


class Fewer(Batches):
    def __len__(self):
        return 4


@pytest.mark.parametrize("schedule", [None, dict(type="InverseSqrtLR", warmup_steps=0, warmup_epochs=1.0)])
def test_schedule_of_epochs_of_another_length_continues_after_the_same_fraction(tmp_path, caplog, schedule):
    run(tmp_path / "run", epochs=2, schedule=schedule)
    changed = dict(loader=Fewer(), batches_per_epoch=4, schedule=schedule)
    _, progress = run(tmp_path / "run", **changed, resume=tmp_path / "run/last.pth")
    assert progress.step == 2 * 8 + 2 * 4
    assert "an epoch had 8 steps and has 4 now: the learning-rate schedule continues at step 8 in place" in caplog.text
    run(tmp_path / "whole", **changed)
    rates = [[record["lr"] for record in records(tmp_path / name, "train")] for name in ("run", "whole")]
    assert rates[0][-2:] == pytest.approx(rates[1][-2:])


def test_run_ends_after_the_epoch_in_which_a_time_is_reached(tmp_path, capsys):
    whole, _ = run(tmp_path / "whole")
    soon = EndAfter(minutes=1e-9)
    _, progress = run(tmp_path / "twice", added_hooks=[soon])
    _, progress = run(tmp_path / "twice", added_hooks=[soon], resume=tmp_path / "twice/last.pth")
    assert progress.epoch == 2  # the time began again
    capsys.readouterr()
    _, progress = run(tmp_path / "parts", added_hooks=[EndAfter(minutes=1e-9)])
    assert progress.epoch == 1 and "ending with this epoch, as 1e-09 minutes have passed" in capsys.readouterr().out
    resumed, progress = run(tmp_path / "parts", added_hooks=[EndAfter(minutes=60)], resume=tmp_path / "parts/last.pth")
    assert progress.epoch == 4
    assert_same_weights(resumed, whole)
    with pytest.raises(ConfigError, match="minutes=0"):
        EndAfter(minutes=0)


def test_a_hook_ends_an_epoch_early_and_its_model_is_evaluated(tmp_path):
    class AfterStep5(Hook):
        def ends_epoch(self, run):
            return run.progress.step >= 5

        def should_end(self, run):
            return self.ends_epoch(run)

    def evaluate(model):
        return {"score": 1.0}

    settings = dict(evaluate=evaluate, eval_every=3, best_metric="score")
    _, progress = run(tmp_path / "run", added_hooks=[AfterStep5()], **settings)
    assert (progress.epoch, progress.batch, progress.step) == (1, 0, 5)
    assert [record["step"] for record in records(tmp_path / "run", "train")] == [4, 5]
    assert [record["step"] for record in records(tmp_path / "run", "val")] == [5]
    assert (tmp_path / "run" / BEST_NAME).is_file()
    _, progress = run(tmp_path / "run", resume=tmp_path / "run" / LAST_NAME, **settings)
    assert (progress.epoch, progress.step) == (4, 5 + 3 * 8)


def test_two_accumulated_batches_equal_one_batch_of_both(tmp_path):
    class Joined(Batches):
        def __len__(self):
            return 4

        def __iter__(self):
            batches = list(super().__iter__())
            for a, b in zip(batches[::2], batches[1::2]):
                yield Batch({"images": torch.cat([a.inputs["images"], b.inputs["images"]])}, a.targets + b.targets)

    def without_dropout(loader, accumulate, run_dir):
        run_dir.mkdir()
        torch.manual_seed(0)
        model = Regression()
        model.layers[2].p = 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        schedule = SCHEDULES.build("CosineLR", optimizer=optimizer, steps_per_epoch=4, epochs=1)
        fit(
            TrainRun(
                model=model,
                criterion=SquaredError(),
                loader=loader,
                optimizer=optimizer,
                schedule=schedule,
                settings=TrainSettings(epochs=1, accumulate=accumulate),
                device=CPU,
                run_dir=run_dir,
            )
        )
        return model

    joined = without_dropout(Joined(), 1, tmp_path / "a")
    accumulated = without_dropout(Batches(), 2, tmp_path / "b")
    for a, b in zip(joined.parameters(), accumulated.parameters()):
        torch.testing.assert_close(a, b)


def test_early_stopping_leaves_the_best_and_the_last_checkpoint(tmp_path):
    metrics = iter([0.2, 0.5, 0.4, 0.3, 0.9])
    _, progress = run(tmp_path / "run", evaluate=lambda model: {"bbox/AP": next(metrics)}, patience=2, epochs=5)
    assert progress.epoch == 4 and progress.best == 0.5
    assert read_checkpoint(tmp_path / "run" / BEST_NAME)["progress"]["epoch"] == 2
    assert read_checkpoint(tmp_path / "run" / LAST_NAME)["progress"]["epoch"] == 4
    assert [r["metrics"]["bbox/AP"] for r in records(tmp_path / "run", "val")] == [0.2, 0.5, 0.4, 0.3]


def test_of_equal_values_the_later_weights_are_the_best_but_not_better(tmp_path):
    metrics = iter([0.0, 0.0, 0.0, 0.0])
    _, progress = run(tmp_path / "run", evaluate=lambda model: {"bbox/AP": next(metrics)}, patience=3, epochs=6)
    assert progress.epoch == 4 and progress.worse_in_a_row == 3  # a metric that stays 0 ends the run
    best, last = (read_checkpoint(tmp_path / "run" / name) for name in (BEST_NAME, LAST_NAME))
    assert best["progress"]["epoch"] == 4
    assert all(value.equal(last["model"][name]) for name, value in best["model"].items())


def test_epochs_without_an_evaluation_are_not_the_best(tmp_path):
    metrics = iter([0.5, 0.5, 0.4])
    options = {"evaluate": lambda model: {"bbox/AP": next(metrics)}, "eval_every": 2, "epochs": 6}
    run(tmp_path / "run", **options)
    assert read_checkpoint(tmp_path / "run" / BEST_NAME)["progress"]["epoch"] == 4


def test_early_stopped_run_trains_on_only_with_more_patience(tmp_path, capsys):
    metrics = iter([0.5, 0.4, 0.3, 0.2])
    options = {"evaluate": lambda model: {"bbox/AP": next(metrics)}, "resume": tmp_path / "run" / LAST_NAME}
    run(tmp_path / "run", **{**options, "resume": None}, patience=1)
    before = (tmp_path / "run" / LAST_NAME).read_bytes()
    for _ in range(2):
        capsys.readouterr()
        _, progress = run(tmp_path / "run", patience=1, **options)
        assert progress.epoch == 2 and (tmp_path / "run" / LAST_NAME).read_bytes() == before
        assert "stopped early: 1 evaluations without a better bbox/AP, and train.patience=1. Raise" in (
            capsys.readouterr().out
        )
    _, progress = run(tmp_path / "run", patience=2, **options)
    assert progress.epoch == 3 and progress.worse_in_a_row == 2


def test_best_by_another_metric_is_not_compared_after_a_resume(tmp_path, capsys):
    values = iter([{"top1": 0.9, "loss": 3.0}, {"top1": 0.5, "loss": 2.0}, {"top1": 0.6, "loss": 4.0}])
    options = {"evaluate": lambda model: next(values), "epochs": 3}
    run(tmp_path / "run", **{**options, "epochs": 1}, best_metric="top1")
    _, progress = run(tmp_path / "run", resume=tmp_path / "run" / LAST_NAME, best_metric="loss", **options)
    assert "best.pth is now selected by loss; the best top1 so far no longer counts" in capsys.readouterr().out
    assert progress.best == -2.0 and progress.worse_in_a_row == 1  # for a loss, the lowest is the best
    assert read_checkpoint(tmp_path / "run" / BEST_NAME)["progress"]["epoch"] == 2
    run(tmp_path / "run", resume=tmp_path / "run" / LAST_NAME, best_metric=None, **options)
    assert "best.pth, the best by loss so far, stays, and is used in place of later weights. Remove it to use last" in (
        capsys.readouterr().out
    )


def test_best_on_other_data_is_not_compared_after_a_resume(tmp_path, capsys):
    values = iter([0.9, 0.5, 0.4, 0.3])
    options = {"evaluate": lambda model: {"top1": next(values)}, "best_metric": "top1"}
    for epochs, data, is_reset in ((1, "4 17", False), (2, "4 17", False), (3, "5 18", True), (4, "5 18", False)):
        resume = tmp_path / "run" / LAST_NAME if epochs > 1 else None
        _, progress = run(tmp_path / "run", epochs=epochs, resume=resume, val_data=data, **options)
        message = "data.val is not what it was; the best top1 so far no longer counts"
        assert (message in capsys.readouterr().out) == is_reset
    assert progress.best == 0.4 and read_checkpoint(tmp_path / "run" / BEST_NAME)["progress"]["epoch"] == 3


def test_resuming_a_complete_run_reports_that_it_is_complete(tmp_path, capsys):
    run(tmp_path / "run")
    before = (tmp_path / "run" / LAST_NAME).read_bytes()
    capsys.readouterr()
    run(tmp_path / "run", resume=tmp_path / "run" / LAST_NAME)
    printed = capsys.readouterr().out
    assert "epoch 4 of 4 is done" in printed
    done = "4 of 4 epochs and 0 batches of the next are done"
    assert re.search(rf"resumed from \S*/run/last.pth after step \d+: {done}\n", printed)
    assert (tmp_path / "run" / LAST_NAME).read_bytes() == before


def test_evaluation_runs_every_n_epochs_and_at_the_end(tmp_path):
    run(tmp_path / "run", evaluate=lambda model: {"bbox/AP": 0.0}, eval_every=3)
    assert [r["epoch"] for r in records(tmp_path / "run", "val")] == [3, 4]


def test_unknown_best_metric_is_reported_without_losing_the_run(tmp_path, capsys):
    _, progress = run(tmp_path / "run", evaluate=lambda model: {"bbox/AP": 0.1}, best_metric="bbox/AP5")
    assert progress.epoch == 4
    assert "train.best_metric=bbox/AP5: not among the metrics" in capsys.readouterr().out


def test_evaluation_uses_the_moving_average(tmp_path):
    seen = []
    model, _ = run(tmp_path / "run", evaluate=lambda m: seen.append(m) or {"bbox/AP": 0.1}, ema_decay=0.5)
    assert all(m is not model for m in seen)
    saved = read_checkpoint(tmp_path / "run" / LAST_NAME)
    assert torch.equal(saved["ema"]["layers.0.weight"], seen[-1].state_dict()["layers.0.weight"])
    assert not torch.equal(saved["ema"]["layers.0.weight"], saved["model"]["layers.0.weight"])


def test_resuming_from_weights_only_names_what_is_missing(tmp_path):
    torch.save({"model": Regression().state_dict()}, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match="cannot be resumed, it lacks optimizer, schedule"):
        run(tmp_path / "run", resume=tmp_path / "weights.pth")


@pytest.mark.parametrize(("accumulate", "sizes"), [(3, [3, 3, 2]), (2, [2] * 4), (20, [8])])
def test_last_smaller_accumulation_group_is_averaged_over_its_own_size(tmp_path, accumulate, sizes):
    seen = []

    class Sizes(Hook):
        def after_step(self, run, step):
            seen.append(len(step.losses))

    _, progress = run(tmp_path / "run", epochs=1, accumulate=accumulate, added_hooks=[Sizes()])
    assert seen == sizes and progress.step == len(sizes)


@pytest.mark.parametrize(("accumulate", "num_batches"), [(1, 5), (4, 5), (4, 4)])
def test_a_loader_that_ends_before_its_length_is_an_error_with_both_numbers(tmp_path, accumulate, num_batches):
    class Short(Batches):
        def __iter__(self):
            return iter(list(super().__iter__())[:num_batches])

    with pytest.raises(TrainingError, match=f"ended after {num_batches} batches of the epoch, but its length is 8"):
        run(tmp_path / "run", loader=Short(), epochs=1, accumulate=accumulate)


@pytest.mark.parametrize(("loading", "optimizing"), [(0.01, 0.03), (0.03, 0.01)])
def test_slow_data_are_reported_and_a_slow_optimizer_is_not_mistaken_for_them(
    tmp_path, monkeypatch, loading, optimizing
):
    class Slow(Batches):
        def __iter__(self):
            for batch in super().__iter__():
                clock.sleep(loading)
                yield batch

    clock, step = Clock(), torch.optim.AdamW.step
    for module in ("vitkit.engine.step", "vitkit.engine.hooks.log"):
        monkeypatch.setattr(f"{module}.time", clock)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a: (clock.sleep(optimizing), step(self, *a)))
    run(tmp_path / "run", loader=Slow(), epochs=1)
    shares = [record["data_share"] for record in records(tmp_path / "run", "train")]
    assert shares == pytest.approx([loading / (loading + optimizing)] * 2)


def test_a_metric_that_is_never_measured_does_not_stop_a_run(tmp_path):
    _, progress = run(tmp_path / "run", evaluate=lambda model: {"bbox/AP": 0.1}, best_metric="AP", patience=1)
    assert progress.epoch == 4 and not (tmp_path / "run" / BEST_NAME).exists()


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["bbox/AP", "loss"])
def test_evaluations_without_anything_to_measure_are_neither_better_nor_worse(tmp_path, capsys, name, value):
    options = dict(best_metric=name, patience=1, ema_decay=0.9, ema_ramp_steps=5, restart_epoch=2)
    _, progress = run(tmp_path / "run", evaluate=lambda model: {name: value}, **options)
    assert progress.epoch == 4 and progress.worse_in_a_row == 0 and progress.best == -math.inf
    assert not (tmp_path / "run" / BEST_NAME).exists()
    printed = capsys.readouterr().out
    assert f"train.best_metric={name}: has no value ({value:g})" in printed and ": there is no best.pth" in printed
    assert "epoch 3 continues from the average of the weights so far" in printed
    assert [name for name in RUN_WEIGHTS if (tmp_path / "run" / name).is_file()] == [LAST_NAME]


def test_the_best_of_the_measured_evaluations_is_kept(tmp_path):
    values = iter([0.2, -1.0, 0.5, math.nan, 0.4, -1.0])
    _, progress = run(tmp_path / "run", evaluate=lambda model: {"bbox/AP": next(values)}, patience=2, epochs=6)
    assert progress.epoch == 6 and progress.best == 0.5 and progress.worse_in_a_row == 1
    assert read_checkpoint(tmp_path / "run" / BEST_NAME)["progress"]["epoch"] == 3


def test_an_overflowing_fp16_step_moves_neither_weights_nor_schedule(tmp_path):
    class Large(Batches):
        """The first gradients overflow at the scale of 2^16 that a run begins with."""

        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                scale = 1e35 if number == 0 else 1e-4
                yield Batch({"images": batch.inputs["images"]}, [{"value": scale * t["value"]} for t in batch.targets])

    class Linear(SquaredError):
        def forward(self, outputs, targets):
            return {"product": (outputs["value"].float() * torch.stack([t["value"] for t in targets])).sum()}

    _, progress = run(tmp_path / "run", loader=Large(), criterion=Linear(), epochs=1, precision="fp16")
    saved = read_checkpoint(tmp_path / "run" / LAST_NAME)
    assert progress.step == saved["schedule"]["last_epoch"] == 7
    assert saved["scaler"]["scale"] == 2.0**15


def test_the_seed_of_a_rank_may_exceed_the_32_bits_of_numpy():
    seed_everything(2**32 - 1 + 1)
    assert np.random.get_state()[1][0] == 0 and torch.initial_seed() == 2**32


def test_slow_first_step_of_a_compiled_run_is_announced(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    run(tmp_path / "compiled", epochs=1, compile=True)
    run(tmp_path / "eager", epochs=1)
    assert capsys.readouterr().out.count("train.compile: the first step, and the first with images of another") == 1


def test_run_that_ends_before_the_matchers_late_costs_warns(tmp_path, caplog):
    class MatchedSquaredError(SquaredError):
        late_changes = MatchedCriterion.late_changes

    criterion = MatchedSquaredError()
    criterion.matcher = CRITERIA.build(load_config("deimv2_n_coco")["criterion"]).matcher
    run(tmp_path / "run", criterion=criterion, epochs=2)
    message = (
        "criterion.matcher (HungarianMatcher): it changes at epoch 136, and the run ends before, with train.epochs=2"
    )
    assert message in caplog.text
    for changes_at in (2, 1):
        caplog.clear()
        criterion.matcher.changes_at = changes_at
        run(tmp_path / f"{changes_at}", criterion=criterion, epochs=2)
        assert ("the run ends before" in caplog.text) == (changes_at == 2)
