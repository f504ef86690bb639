"""`vitkit.pretrain`: train a backbone for other models on images without labels, within a given time."""

import inspect
import json
import math
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.apps.pretraining.features import measure_features
from vitkit.apps.pretraining.methods import METHODS, WANTED_STEPS, choose_method
from vitkit.apps.pretraining.photos import IMAGES, SHOWN, Photos, check_photos, leave_out_lost
from vitkit.apps.pretraining.plan import PLAN, Plan, PretrainChoice, PretrainRequest, config_text, make_shown_dataset
from vitkit.apps.pretraining.report import write_pretraining_report
from vitkit.apps.starter.child_runs import StepCost
from vitkit.apps.starter.timed_run import CONFIG, is_free, make_free_folder, time_settings, train_in_time
from vitkit.apps.training.checking import check_training
from vitkit.apps.visualization.curves import read_log
from vitkit.config import load_config
from vitkit.data.datasets.image_folder import list_class_folders
from vitkit.data.loading.loader import leave_imported_main
from vitkit.devices import default_device
from vitkit.engine.hooks import Hook, Interrupted
from vitkit.engine.run import TrainRun
from vitkit.errors import ConfigError, DataError, VitkitError
from vitkit.io.folders import IMAGE_SUFFIXES, data_files
from vitkit.io.json_files import read_json
from vitkit.io.output import write_text
from vitkit.logging import LOG_NAME
from vitkit.protocols.evaluator import Evaluator
from vitkit.registry import BACKBONES
from vitkit.text_format import pluralize
from vitkit.weights.locate import BACKBONE_WEIGHTS, LAST_NAME, locate

BEFORE, REPORT = "before.json", "report.html"
"""Files in the run's folder: the features' metrics at the start, and the report."""
MIN_STEPS = 50
"""The number of steps below which a run is refused."""
NUM_EPOCHS = 20
"""About how many epochs a run has: with few images, each is in an epoch several times; of many, a part is."""
BACKBONES_OF_START = ("resnet18", "resnet50")
"""The backbones that `vitkit start` chooses by itself if it is given their weights."""
UNLABELED = {"type": "FeatureStatistics"}


@dataclass(frozen=True)
class Pretrained:
    """The results of `pretrain`."""

    folder: Path
    """The run's folder, which `model.backbone.pretrained` of other models takes."""
    config: Path
    weights: Path | None
    """The trained backbone; None for a dry run."""
    before: dict[str, float]
    """Metrics of the features with the weights at the start."""
    after: dict[str, float]
    """Those of the trained backbone; {} for a dry run."""
    report: Path | None


def pretrain(
    photos: str | Path | Sequence[str | Path] | Mapping[str, Any] | None = None,
    *,
    method: str | None = None,
    teacher: str | None = None,
    backbone: str | None = None,
    hours: float | None = None,
    labeled: str | Path | None = None,
    run_dir: str | Path = "runs/pretrain",
    resume: str | Path | None = None,
    dry_run: bool = False,
    device: str = "auto",
    overrides: Sequence[str] = (),
) -> Pretrained:
    """Train a backbone on images without labels within a given time, and print what is done, as `vitkit pretrain` does.

    Args:
        photos: a folder, a pattern, a list of files, a text file of names, or the spec of a dataset whose targets are
            left out; see `UnlabeledImages`. Not needed with `resume`.
        method: "distil", "mae" or "dino"; None: "distil" if there is a teacher, else "dino".
        teacher: for "distil", the name of a backbone, with its default weights or those of a file ("resnet50=FILE"), or
            the folder of a run.
        backbone: name of the backbone to train; None: the method's default.
        hours: wall-clock time for everything; None: 1.
        labeled: a folder with a folder of images for each class, by which the features are judged before and after.
        run_dir: folder to write, with a number after its name if it has contents.
        resume: the folder of a run to go on with, whose settings stay; those that are given must be the same.
        dry_run: choose and write the config, but do not train.
        device: "cpu", "cuda", ...; "auto": an accelerator if there is one.
        overrides: values for the config, `key.sub=value`.
    Raises:
        VitkitError, KeyboardInterrupt: as `vitkit.start` does.
    """
    leave_imported_main()
    began = time.monotonic()
    if hours is not None and not (hours > 0 and math.isfinite(hours)):
        raise ConfigError(f"hours={hours:g}: expected a number above 0.")
    device = default_device() if device == "auto" else device
    source = as_plain(photos) if photos else None
    labeled = None if labeled is None else os.path.abspath(labeled)
    teacher = None if teacher is None else as_absolute(teacher)
    if resume is not None:
        given = dict(photos=source, method=method, teacher=teacher, backbone=backbone, hours=hours, labeled=labeled)
        folder = Path(resume)
        plan = Plan.read(folder)
        check_same(plan.request, {**given, "overrides": list(overrides) or None}, folder)
        leave_out_lost(plan.photos)
    else:
        if source is None:
            raise ConfigError("pretrain: give images to learn from, such as a folder, or resume=RUN.")
        method = choose_method(method, teacher)
        backbone = backbone or METHODS[method].backbone
        request = PretrainRequest(source, method, teacher, backbone, hours or 1.0, labeled, list(overrides))
        folder = make_free_folder(Path(run_dir))
        try:
            plan = make_plan(request, folder, device)
        except VitkitError:
            if is_free(folder):  # otherwise it has contents, such as a list of what was wrong
                shutil.rmtree(folder, ignore_errors=True)
            raise
    try:
        if not plan.choice.step_minutes:
            plan = choose(plan, folder, device)
        if not (folder / BEFORE).is_file():
            before, _ = measure(plan, folder, device, trained=False)
            write_text(folder / BEFORE, json.dumps(before))
        print(f"chosen    {plan.request.method} of {plan.request.backbone}, {plan.choice.describe(plan.photos)}")
        print(f"config    {folder / CONFIG}", flush=True)
        before = read_json(folder / BEFORE, key="--resume")
        if dry_run:
            print(f"train it  {resume_command(folder)}")
            return Pretrained(folder, folder / CONFIG, None, before, {}, None)
        train_planned(plan, folder, device, began=began)
        return conclude(plan, folder, device, before, began=began)
    except (KeyboardInterrupt, SystemExit) as interruption:  # the latter by SIGTERM, or in a child process
        if not isinstance(interruption.__cause__ or interruption, Interrupted):  # which has said so
            print(f"interrupted; this goes on with it: {resume_command(folder)}")
        raise


def resume_command(folder: Path) -> str:
    """Return the command that resumes a run."""
    return shlex.join(["vitkit", "pretrain", "--resume", str(folder)])


class GoesOnByPretrain(Hook):
    """Makes an interrupted run name the command that resumes it, as `vitkit train` would end without a report."""

    @contextmanager
    def during_training(self, run: TrainRun) -> Iterator[None]:
        """See `Hook`."""
        try:
            yield
        except Interrupted as interrupted:
            interrupted.command = resume_command(run.run_dir)
            raise


def as_plain(photos: str | Path | Sequence[str | Path] | Mapping[str, Any]) -> Any:
    """Return a source of images as JSON can hold it, with absolute paths.

    Raises:
        ConfigError: a dataset's spec has a value that JSON cannot hold.
    """
    if isinstance(photos, Mapping):
        try:
            return json.loads(json.dumps(dict(photos), default=os.fspath))
        except TypeError as error:
            raise ConfigError(f"photos: {error}. Give a dataset's spec as in a config, of plain values.") from error
    if isinstance(photos, str | Path):
        return os.path.abspath(photos)
    return [os.path.abspath(path) for path in photos]


def as_absolute(teacher: str) -> str:
    """Return a teacher with the absolute path of its run's folder or file of weights."""
    name, is_with_weights, weights = teacher.partition("=")
    if os.path.exists(teacher):
        return os.path.abspath(teacher)
    is_file = is_with_weights and locate(weights, ("timm", "url", "hub")) is None
    return f"{name}={os.path.abspath(weights)}" if is_file else teacher


def check_same(request: PretrainRequest, given: Mapping[str, Any], folder: Path) -> None:
    """Check that a run is resumed as it was started.

    Raises:
        ConfigError: something else is asked for.
    """
    for name, value in given.items():
        started = getattr(request, name)
        if value is not None and value != started:
            how = f"with {name} {started}" if started else f"without {name}"
            raise ConfigError(
                f"--resume {folder}: this run was started {how}, not {value}. To go on with it, leave "
                "out what differs; for another run, leave out --resume."
            )


def make_plan(request: PretrainRequest, folder: Path, device: str) -> Plan:
    """Look at the images, write a first config and check it; return the plan without the chosen settings."""
    method = METHODS[request.method]
    check_options(request, folder)
    photos = check_photos(request.photos, folder)
    print(f"photos    {photos.summary}")
    for note in photos.notes:
        print(f"  note: {note}")
    usual = method.images["cpu" if device == "cpu" else "other"]
    images = min(usual, photos.count)
    if images < usual:
        print(f"batch     {images} images a step in place of {usual}, as there are no more")
    choice = PretrainChoice(min(sizes_for(request, photos)), images)
    plan = Plan(request, photos, choice)
    plan.write(folder)
    config = load_config(folder / CONFIG)
    given = config["train"]["images_per_step"]
    if "train.images_per_step" in request.values and given is not None:
        plan = replace(plan, choice=replace(choice, images=given, batch=min(images, given)))
        plan.write(folder)
        config = load_config(folder / CONFIG)
    try:
        check_training(config, torch.device(device))
    except VitkitError as error:  # such as a teacher without weights
        for name in (PLAN, CONFIG, IMAGES, SHOWN):
            (folder / name).unlink(missing_ok=True)
        raise type(error)(str(error).replace("model.teacher.pretrained=FILE", "--teacher NAME=FILE")) from error
    return plan


def check_options(request: PretrainRequest, folder: Path) -> None:
    """Check the config that the options make, before the images are looked at.

    Raises:
        ConfigError: a name or a key is unknown, the backbone is of the wrong kind, or a folder is missing.
    """
    constructor, _ = BACKBONES.resolve(request.backbone, "--backbone")
    needed = METHODS[request.method].network
    if needed is not None and constructor is not needed:
        raise ConfigError(
            f"--method {request.method}: {request.backbone} is not a plain ViT, whose patches it removes. Choose one: "
            f"--backbone {METHODS[request.method].backbone}, or another method."
        )
    if request.labeled is not None and not os.path.isdir(request.labeled):
        raise ConfigError(
            f"--labeled {request.labeled}: no such folder. Expected one with a folder of images for each class."
        )
    if request.labeled is not None:
        classes = [name for name in list_class_folders(Path(request.labeled)) if _has_image(request.labeled, name)]
        if len(classes) < 2:
            raise ConfigError(
                f"--labeled {request.labeled}: has images of {pluralize(len(classes), 'classes')}"
                f"{f' ({classes[0]})' if classes else ''}, so that every guess is right. Expected a folder of images "
                "for each of at least two."
            )
    photos = Photos(request.photos, request.photos, 0, 0, [])
    draft = Plan(request, photos, PretrainChoice(min(sizes_for(request, photos)), 1))
    write_text(folder / CONFIG, config_text(draft, folder))
    try:
        load_config(folder / CONFIG)
    finally:
        (folder / CONFIG).unlink()


def _has_image(*folders: str) -> bool:
    return any(path.suffix.lower() in IMAGE_SUFFIXES for path in data_files(Path(*folders)))


def sizes_for(request: PretrainRequest, photos: Photos) -> dict[int, int]:
    """Return the sizes up to that of the images, or else the smallest, each with the steps that it must leave time for;
    for a method of patches, they are multiples of these."""
    method = METHODS[request.method]
    constructor, arguments = BACKBONES.resolve(request.backbone)
    patch = 1
    if method.network is not None:
        patch = arguments.get("patch_size", inspect.signature(constructor).parameters["patch_size"].default)
    sizes = {size // patch * patch: steps for size, steps in method.sizes.items()}
    return {size: steps for size, steps in sizes.items() if size <= max(photos.short_side, min(sizes))}


def choose(plan: Plan, folder: Path, device: str) -> Plan:
    """Time a few steps of the smallest size, then of the largest that leaves time for enough steps.

    Raises:
        ConfigError: the time is too short.
        TrainingError: training failed.
    """
    request, photos = plan.request, plan.photos
    minutes = request.training_minutes
    sizes = sizes_for(request, photos)

    def time_choice(choice: PretrainChoice) -> PretrainChoice:
        # Without the time of a step, so that a resumption times again what was not timed to the end.
        replace(plan, choice=replace(choice, step_minutes=0.0)).write(folder)
        cost = time_settings(folder, f"crops of {choice.size} pixels", request, device)
        return replace(choice, step_minutes=cost.minutes)

    least, *larger = sizes
    choice = with_wanted_images(time_choice(replace(plan.choice, size=least)), plan, minutes)
    for size in reversed(larger):
        if minutes / choice.step_minutes * (choice.size / size) ** 2 >= sizes[size]:
            choice = time_choice(replace(choice, size=size))
            break
    steps = minutes / choice.step_minutes
    if steps < MIN_STEPS and request.is_paced:
        hours = request.hours * MIN_STEPS / steps
        raise ConfigError(
            f"--hours {request.hours:g}: too short: there is time for {pluralize(int(steps), 'steps')}; expected at "
            f"least {MIN_STEPS}, which take --hours {hours + 0.005:.2f}."
        )
    repeats = steps * choice.images / (NUM_EPOCHS * photos.count) if request.is_paced else 1
    repeats = max(1, round(repeats)) if repeats >= 0.5 else round(repeats, 6)
    choice = replace(choice, repeats=repeats)
    choice = replace(choice, epochs=max(1, int(steps / choice.steps_per_epoch(photos))))
    replace(plan, choice=choice).write(folder)
    # Those of the command line, if it has them, decide how often there is an evaluation.
    choice = replace(choice, epochs=load_config(folder / CONFIG)["train"]["epochs"])
    plan = replace(plan, choice=choice)
    plan.write(folder)
    return plan


def with_wanted_images(choice: PretrainChoice, plan: Plan, minutes: float) -> PretrainChoice:
    """Return a choice with as many images in a step as the method wants, if the user gives no number, and there are as
    many photos, and time for enough of such steps; say so, or that there is not."""
    wanted = METHODS[plan.request.method].wanted_images
    is_given = "train.images_per_step" in plan.request.values
    if is_given or wanted <= choice.images or wanted > plan.photos.count:
        return choice
    steps = int(minutes / choice.step_minutes * choice.images / wanted)
    if steps < WANTED_STEPS:
        hours = plan.request.hours * WANTED_STEPS / max(1, steps)
        print(
            f"batch     {choice.images} images a step: {plan.request.method} wants {wanted}, of which there would be "
            f"{pluralize(steps, 'steps')} (about --hours {hours:.2g} for {WANTED_STEPS})"
        )
        return choice
    print(f"batch     {wanted} images a step, in batches of {choice.images}: there is time for {steps} such steps")
    larger = wanted / choice.images
    return replace(choice, images=wanted, batch=choice.images, step_minutes=choice.step_minutes * larger)


def measure(
    plan: Plan, folder: Path, device: str, *, trained: bool, val: Mapping[str, Any] | None = None
) -> tuple[dict[str, float], Evaluator]:
    """Measure the features of the run's backbone.

    Args:
        trained: whether with the weights that it has learned, or those with which the run starts.
        val: the dataset, without labels; None: that of the config, with its evaluator.
    """
    config = load_config(folder / CONFIG)
    spec = config["model"]["backbone"]
    backbone = dict(spec) if isinstance(spec, Mapping) else {"type": spec}
    data, evaluator = config["data"], config["evaluator"]
    if trained:
        backbone["pretrained"] = str(folder)
    if val is not None:
        data, evaluator = {**data, "val": val}, UNLABELED
    return measure_features(backbone, data, evaluator, device=device)


def train_planned(plan: Plan, folder: Path, device: str, *, began: float) -> None:
    """Train, or resume training, until the time is over."""
    used, how = 0.0, dict(run_dir=folder)
    if (folder / LAST_NAME).is_file():
        how = dict(resume=folder)
        with suppress(DataError):  # nothing was logged yet
            used = 60 * read_log(folder / LOG_NAME)[0][-1]["minutes"]
    choice, deadline = plan.choice, began + 3600 * plan.request.hours - used

    def replan(epochs: int, minutes: float) -> None:
        replace(plan, choice=replace(choice, epochs=epochs, step_minutes=minutes)).write(folder)

    cost = StepCost(choice.step_minutes, 0.0, choice.steps_per_epoch(plan.photos))
    how |= dict(request=plan.request, deadline=deadline, device=device, hooks=[GoesOnByPretrain()])
    train_in_time(folder / CONFIG, replan, choice.epochs, cost, **how)


def conclude(plan: Plan, folder: Path, device: str, before: dict[str, float], *, began: float) -> Pretrained:
    """Measure the trained backbone, write the report, and print the results and how to use them."""
    request, photos = plan.request, plan.photos
    after, _ = measure(plan, folder, device, trained=True)
    _, evaluator = measure(plan, folder, device, trained=True, val=make_shown_dataset(plan))
    last = read_log(folder / LOG_NAME)[0][-1]
    use = f"model.backbone.pretrained={shlex.quote(str(folder))}"
    if request.backbone not in BACKBONES_OF_START:
        use = f"model.backbone={request.backbone} {use}"
    facts = {
        "method": f"{request.method}: {METHODS[request.method].text}" + f", {request.teacher}" * bool(request.teacher),
        "backbone": request.backbone,
        "images": "; ".join([photos.summary, *photos.notes]),
        "trained": f"{pluralize(last['step'], 'steps')}, {last['minutes']:.0f} min, {plan.choice.size} pixels",
        "use it": use,
    }
    report = write_pretraining_report(
        folder / REPORT,
        title=f"Pretraining on {request.photos if isinstance(request.photos, str) else 'images'}",
        facts=facts,
        before=before,
        after=after,
        dataset=evaluator.dataset,
        features=torch.from_numpy(
            np.stack([evaluator.stored_predictions[name] for name in evaluator.dataset.image_ids])
        ),
    )
    for name, value in after.items():
        if name in before:
            print(f"features  {name} {before[name]:.3f} before, {value:.3f} after ({value - before[name]:+.3f})")
    print(f"report    {report}")
    print(f"weights   {folder / BACKBONE_WEIGHTS}")
    print(f"use it    vitkit start IMAGES ANNOTATIONS {use}")
    print(f"ended     after {(time.monotonic() - began) / 60:.0f} of {60 * request.hours:.0f} min", flush=True)
    return Pretrained(folder, folder / CONFIG, folder / BACKBONE_WEIGHTS, before, after, report)
