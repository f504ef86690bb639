"""`vitkit.start`: train and evaluate a model on images and annotations, within a given time."""

import functools
import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vitkit.apps.datasets.mirroring import sided_names
from vitkit.apps.doctor import diagnose, report
from vitkit.apps.inference.card import METRICS, Measured, data_name, save_metrics
from vitkit.apps.inference.load import TrainedModel
from vitkit.apps.report import write_report
from vitkit.apps.starter.capacity import QUERIES_PER_OBJECT, SELECTS_BOXES, capacity_lines, num_locations
from vitkit.apps.starter.child_runs import StepCost
from vitkit.apps.starter.own_data import OwnData, read_own_data
from vitkit.apps.starter.recipes import RECIPES, Network
from vitkit.apps.starter.timed_run import (
    CONFIG,
    TRAINING_SHARE,
    TimedRequest,
    comment,
    derive_config,
    make_free_folder,
    time_settings,
    train_in_time,
)
from vitkit.apps.starter.zero_shot import find_text_prompted, score_zero_shot
from vitkit.apps.training import api
from vitkit.apps.training.api import Run
from vitkit.apps.visualization.curves import read_log
from vitkit.config import Config, load_config
from vitkit.data.loading.loader import leave_imported_main
from vitkit.devices import default_device, has_bfloat16
from vitkit.engine.hooks.saving import Interrupted
from vitkit.errors import CheckpointError, ConfigError, DataError, VitkitError
from vitkit.logging import LOG_NAME
from vitkit.protocols.evaluator import is_measured
from vitkit.registry import BACKBONES, nearest
from vitkit.text_format import pluralize
from vitkit.weights import load_pretrained
from vitkit.weights.pretrained import trained_backbone_spec

FASTEST_STEP = 0.02 / 60
"""Minutes of a training step that no processor undercuts: less time than an epoch of these is refused at once."""
FASTER = 4
"""How many times as fast as the first one another setting may be: by bfloat16 and by freezing."""
NUM_EVALUATIONS = 5
UP_TO_RES4 = "model.backbone.out_features=[res3,res4] model.neck.num_levels=3"
"""The overrides that let a detector's backbone end at res4."""
SLOW_CHECKS = ("overfit",)
"""Names of the checks of vitkit.apps.doctor that take minutes, and are left out."""


@dataclass(frozen=True)
class StartChoice:
    """The chosen settings of the training."""

    size: int
    precision: str
    weights: str
    """Where the backbone's initial weights come from, for a comment in the config."""
    network: Network
    freezes_res3: bool = False
    small_first: bool = False
    flips: bool = True
    epochs: int = 0
    cost: StepCost | None = None

    @property
    def steps(self) -> int:
        """The total number of training steps."""
        return round(self.epochs * self.cost.steps_per_epoch)

    def options(self, channels: int | None) -> str:
        """Return the arguments of the config's function; `channels`: of the images, None: RGB."""
        options = f"size={self.size}, pretrained={self.network != 'small'}"
        options += ", ends_at_res3=True" * (self.network == "res3") + ", frozen_stages=3" * self.freezes_res3
        options += ", small_first=True" * self.small_first + ", flips=False" * (not self.flips)
        return options + f", channels={channels}" * (channels is not None)

    @property
    def text(self) -> str:
        """The choices in words."""
        return (
            f"{self.size} pixels, {self.precision}, {pluralize(self.epochs, 'epochs')}: "
            f"{pluralize(self.steps, 'steps')} of {60 * self.cost.minutes:.2f} s, "
            f"{self.steps * self.cost.minutes:.0f} min"
        )


@dataclass(frozen=True)
class StartRequest(TimedRequest):
    """The user's request; see `start`."""

    task: str
    images: Path
    annotations: Path | None
    hours: float
    val_fraction: float
    device: str
    overrides: Sequence[str] = ()

    def command(self, hours: float) -> str:
        """Return the command that does the same in another time."""
        words = [str(word) for word in (self.images, self.annotations, *self.overrides) if word is not None]
        options = ["--task", self.task, "--hours", f"{hours:g}", "--val-fraction", f"{self.val_fraction:g}"]
        return shlex.join(["vitkit", "start", *words, *options])

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions from which the fastest is chosen."""
        if "train.precision" in self.values:
            return (self.values["train.precision"].strip("'\""),)
        return ("fp32", "bf16") if has_bfloat16(torch.device(self.device)) else ("fp32",)

    @property
    def channels(self) -> int | None:
        """The number of channels of the images; None: they are read as RGB of 8 bits."""
        value = self.values.get("data.channels", "")
        return int(value) if value.isdecimal() else None


@dataclass(frozen=True)
class Started:
    """The results of `start`."""

    folder: Path
    """The folder with the config, the run and the report."""
    config: Path
    run: Run | None
    """The finished run; None for a dry run."""
    report: Path | None


def start(
    images: str | Path,
    annotations: str | Path | None = None,
    *,
    task: str = "detection",
    hours: float = 1.0,
    val_fraction: float = 0.2,
    run_dir: str | Path = "runs/start",
    dry_run: bool = False,
    zero_shot: str | None = None,
    device: str = "auto",
    overrides: Sequence[str] = (),
) -> Started:
    """Do everything from reading the images to writing the report, and print it, as `vitkit start` does.

    Args:
        images: folder of the images, or a file or folder that leads to both images and annotations.
        annotations: a file or folder in a format that `vitkit.data.formats` reads.
        task: "detection", "instance", "keypoints", "semantic", "panoptic" or "classification".
        hours: wall-clock time for everything.
        val_fraction: the fraction of the images for validation, unless they are split.
        run_dir: folder to write, with a number after its name if it has contents.
        dry_run: choose and write the config, but do not train.
        zero_shot: a text-prompted detector, such as "grounding_dino_swin_tiny", which is scored with the class names
            as its text before anything is trained; the report has its figure beside the trained model's.
        device: "cpu", "cuda", ...; "auto": an accelerator if there is one.
        overrides: values for the config, `key.sub=value`.
    Raises:
        VitkitError: an error that a user can cause, see vitkit/errors.py.
        KeyboardInterrupt: ctrl-C was pressed during training, whose state is saved.
    """
    leave_imported_main()
    if task not in RECIPES:
        raise ConfigError(f"task={task!r}: unknown. {nearest(task, RECIPES)}")
    if not 0 < val_fraction < 1:
        raise ConfigError(f"val_fraction={val_fraction:g}: expected a fraction between 0 and 1.")
    if not (hours > 0 and math.isfinite(hours)):
        raise ConfigError(f"hours={hours:g}: expected a number above 0.")
    if zero_shot is not None and task != "detection":
        raise ConfigError(f"zero_shot={zero_shot!r}: is for task='detection', not {task!r}. Leave it out.")
    prompted = None if zero_shot is None else find_text_prompted(zero_shot)
    annotations = None if annotations is None else Path(annotations)
    device = default_device() if device == "auto" else device
    request = StartRequest(task, Path(images), annotations, hours, val_fraction, device, tuple(overrides))
    load_config(f"start/{task}", overrides, check=False)  # a misspelled key is an error before the data are read
    began, folder = time.monotonic(), make_free_folder(Path(run_dir))
    data = read_own_data(task, request.images, annotations, fraction=val_fraction, out=folder / "data")
    print(f"data      {data.summary}", flush=True)
    if request.channels is not None:
        data = replace(data, config_lines=[*data.config_lines, *pixel_statistics(request, data, folder)])
    choice = choose(request, data, folder)
    later = ", which is measured again during training" * (not dry_run and request.is_paced)
    print(f"chosen    {describe_network(load_config(folder / CONFIG))}, {choice.text}{later}")
    print_expectation(request, data, choice)
    print(f"config    {folder / CONFIG}", flush=True)
    leaks = check(folder / CONFIG, request)
    if dry_run:
        print(f"train it  {shlex.join(['vitkit', 'train', str(folder / CONFIG)])}")
        return Started(folder, folder / CONFIG, None, None)
    facts = {"leakage": "; ".join(leaks)} if leaks else {}
    if prompted is not None:
        facts |= zero_shot_facts(zero_shot, prompted, folder, device)
    run, report_file = train_and_report(
        request, data, choice, folder, leaks=leaks, facts=facts, deadline=began + 3600 * hours
    )
    print(f"ended     after {(time.monotonic() - began) / 60:.0f} of {60 * hours:.0f} min")
    return Started(folder, folder / CONFIG, run, report_file)


def describe_network(config: Config) -> str:
    """Return the name of a config's model and what it starts from: "DINO on ResNet-18 from random weights"."""
    model = config["model"]
    backbone = model.get("backbone")
    text = model["type"]
    if isinstance(backbone, str):
        text += f" on {backbone}"
    elif isinstance(backbone, Mapping):
        text += f" on {backbone['type']}" + (f"-{backbone['depth']}" if "depth" in backbone else "")
        if "pretrained" in backbone:
            text += f" from {'pretrained' if backbone['pretrained'] else 'random'} weights"
    return text


def print_expectation(request: StartRequest, data: OwnData, choice: StartChoice) -> None:
    """Print the figure that the recipe reached in at most as many steps, and the time of these on this machine."""
    others = "without the overrides: " * bool(request.values.keys() - {"model.backbone.pretrained", "train.epochs"})
    text = RECIPES[request.task].expectation(choice.network, choice.steps, choice.cost.minutes, data)
    print(f"expected  {others}{text}", flush=True)


def zero_shot_facts(name: str, found: TrainedModel, folder: Path, device: str) -> dict[str, str]:
    """Score a text-prompted detector on the validation images; print the result and return it for the report."""
    config = load_config(folder / CONFIG)
    try:
        text = describe_score(config["train"]["best_metric"], [score_zero_shot(found, config, device=device)])
    except VitkitError as error:  # a baseline must not end the run
        text = f"not scored: {error}"
    print(f"zero-shot {name}: {text}", flush=True)
    return {f"zero-shot {name}": text}


def describe_score(metric: str | None, results: Iterable[Mapping[str, float]]) -> str:
    """Return the best value of the metric that selects the best checkpoint, or the reason why it has none."""
    if metric is None:
        return "no score, by train.best_metric=none"
    best = max((values[metric] for values in results if is_measured(values.get(metric))), default=None)
    return f"{metric} cannot be measured: no object" if best is None else f"{metric} {best:.3f}"


def train_and_report(
    request: StartRequest,
    data: OwnData,
    choice: StartChoice,
    folder: Path,
    *,
    leaks: Sequence[str],
    facts: Mapping[str, str],
    deadline: float,
) -> tuple[Run, Path]:
    """Train with the chosen settings, write the report, and print the results and possible next steps.

    Args:
        leaks: how the user's own split leaks.
        facts: what else the report says.
        deadline: when everything has to end, on the monotonic clock.
    """
    began = time.monotonic()
    command = shlex.join(["vitkit", "test", str(folder / "run"), "--report", str(folder / "report.html")])
    print(f"report    follows; if this process is killed: {command}", flush=True)
    try:
        run = train_chosen(request, data, choice, folder, deadline=deadline)
    except (KeyboardInterrupt, Interrupted):
        print(f"interrupted; once the training has been resumed and has finished, this writes the report: {command}")
        raise
    config = load_config(folder / CONFIG)
    steps = read_log(run.path / LOG_NAME)[0][-1]["step"]
    trained = f"{pluralize(steps, 'steps')}, {(time.monotonic() - began) / 60:.0f} min"
    evaluated = api.test(run.path, device=request.device)
    if not leaks:
        save_metrics(run.path / METRICS, Measured(data_name(config), "val", {}, evaluated.metrics), run.weights)
    facts = {"model": str(run.path), "trained": trained, **facts}
    path = write_report(
        evaluated.evaluator, folder / "report.html", title=f"{request.task}: {request.images}", facts=facts
    )
    print(f"report    {path}")
    print(f"figures   {run.path / 'predictions.png'}, {run.path / 'curves.png'}")
    reached = describe_score(config["train"]["best_metric"], run.history)
    print(f"reached   {reached} on {pluralize(data.num_val, 'images')}")
    for message in leaks:
        print(f"but       the model was trained on what it is scored on: {message}")
    images = request.images if request.images.is_dir() else request.images.parent
    print(f"use it    {shlex.join(['vitkit', 'predict', str(run.path), '--input', str(images)])}")
    if data.has_test:
        print(f"test it   {shlex.join(['vitkit', 'test', str(run.path), '--split', 'test'])}")
    print(f"better    {request.command(4 * request.hours)}")
    return run, path


def train_chosen(request: StartRequest, data: OwnData, choice: StartChoice, folder: Path, *, deadline: float) -> Run:
    """Train with the chosen settings until a time on the monotonic clock, see `train_in_time`."""

    def replan(epochs: int, minutes: float) -> None:
        new = replace(choice, epochs=epochs, cost=replace(choice.cost, minutes=minutes))
        write_start_config(folder / CONFIG, request, data, new)
        print_expectation(request, data, new)

    how = dict(request=request, deadline=deadline, run_dir=folder / "run", device=request.device)
    if choice.small_first:
        how["relative_cost"] = RECIPES[request.task].small_first.relative_cost
    return train_in_time(folder / CONFIG, replan, choice.epochs, choice.cost, **how)


def pixel_statistics(request: StartRequest, data: OwnData, folder: Path) -> list[str]:
    """Measure the mean and standard deviation of each channel, and return the lines of the config that set them.

    Raises:
        DataError: images cannot be read, or have another number of channels.
    """
    unmeasured = StartChoice(min(RECIPES[request.task].sizes), "fp32", "", "small", epochs=1)
    write_start_config(folder / CONFIG, request, data, unmeasured)
    issues = diagnose(folder / CONFIG, only=["images"], device=request.device)
    failures = [issue.message for issue in issues if issue.verdict == "fail"]
    if failures:
        raise DataError(failures[0])
    details = next(
        issue.details for issue in issues if issue.check == "pixel statistics" and issue.where == "data.train"
    )
    mean, std = ([float(f"{value:.4g}") for value in details[key]] for key in ("mean", "std"))
    print(f"channels  {request.channels}: pixel_mean={mean} pixel_std={std}, of values in 0..1", flush=True)
    return [
        "# measured on the training images",
        f'cfg["model"]["backbone"].update(in_channels={request.channels}, pixel_mean={mean}, pixel_std={std})',
    ]


def imagenet_weights(request: StartRequest) -> tuple[bool, str]:
    """Return whether the backbone is a ResNet-50 from ImageNet's or other weights, and why.

    Raises:
        CheckpointError: an override asks for ImageNet's weights, and they are not available.
    """
    given, backbone = (request.values.get(key) for key in ("model.backbone.pretrained", "model.backbone"))
    if given is None and backbone is not None:
        return False, f"those that model.backbone={backbone} has by default"
    if given is not None and given.lower() in ("false", "none"):
        return False, f"random weights, as model.backbone.pretrained={given} says"
    if given is not None and given.lower() != "true":
        trained = trained_backbone_spec(given.strip("'\""))
        is_resnet50 = trained is None or (trained["type"], trained.get("depth", 50)) == ("ResNet", 50)
        return is_resnet50, f"weights of {given}"
    try:
        load_pretrained(BACKBONES.build(dict(type="ResNet", depth=50, pretrained=True)))
    except CheckpointError as error:
        if given is not None:
            raise
        print(f"  note: {error}")
        return False, "random weights: ImageNet's are not available. model.backbone.pretrained=FILE names them"
    return True, "ImageNet weights"


def choose(request: StartRequest, data: OwnData, folder: Path) -> StartChoice:
    """Time a few steps of the smallest size in each precision, then of the largest that leaves time for enough steps.

    With time for few steps only, a ResNet-50 is frozen up to res3. The cost of a larger size is estimated as
    proportional to its pixels, a slight overestimate. The config of the choice is written into the folder.

    Raises:
        ConfigError: the time is too short for one epoch.
        CheckpointError: see `imagenet_weights`.
        TrainingError: training failed.
    """
    recipe, minutes = RECIPES[request.task], request.training_minutes
    pretrained, weights = imagenet_weights(request)
    network: Network = "resnet50" if pretrained else "small"
    if pretrained and request.device == "cpu" and recipe.has_many_objects(data):
        network = "res3"
    print(f"weights   {weights}", flush=True)

    def refuse_if_too_short(epoch: float, *, times: float = 1.0) -> None:
        """Raise the error if an epoch takes more minutes than `times` those that there are."""
        if epoch > times * minutes:
            raise ConfigError(
                f"--hours {request.hours:g}: too short for one epoch of {pluralize(data.num_train, 'images')}, which "
                f"takes {epoch:.1f} min here. The minimum is --hours {epoch / 60 / TRAINING_SHARE + 0.005:.2f}."
            )

    def measure(choice: StartChoice) -> StartChoice:
        choice = replace(choice, epochs=1000, cost=None)
        write_start_config(folder / CONFIG, request, data, choice)
        settings = f"{choice.size} pixels, {choice.precision}{', frozen up to res3' * choice.freezes_res3}"
        cost = time_settings(folder, settings, request, request.device, epoch_minutes=FASTER * minutes)
        refuse_if_too_short(cost.minutes * cost.steps_per_epoch, times=FASTER)
        epochs = int(minutes / cost.minutes / cost.steps_per_epoch)
        return replace(choice, cost=cost, epochs=epochs)

    images = load_config(f"start/{request.task}", request.overrides, check=False)["data"].get("images_per_gpu", 1)
    refuse_if_too_short(FASTEST_STEP * data.num_train / images)
    sizes = sizes_with_room(request, data, network)
    if sided := sided_names(data.classes):
        print(f"flips     none, as they would make classes such as {' and '.join(sided[:2])} wrong", flush=True)
    unmeasured = StartChoice(sizes[0], "", weights, network, flips=not sided)
    smallest = [measure(replace(unmeasured, precision=precision)) for precision in request.precisions]
    choice = min(smallest, key=lambda it: it.cost.minutes)
    if network == "res3" and choice.steps >= recipe.steps_for_res4:
        reason = f"up to res4: there is time for {pluralize(recipe.steps_for_res4, 'steps')} of a smaller network"
        print(f"network   {reason}", flush=True)
        choice = measure(replace(choice, network="resnet50", weights=f"{weights}, {reason}"))
    if choice.network == "resnet50" and choice.steps < recipe.freeze_below:
        choice = measure(replace(choice, freezes_res3=True))
    if choice.network == "res3" and "model.backbone.out_features" not in request.values:
        reason = (
            f"up to res3: each class that has training objects has at least {recipe.objects_for_res3}; for those of "
            f"everyday photos {UP_TO_RES4} may be better"
        )
        choice = replace(choice, weights=f"{weights}, {reason}")
        print(f"network   {reason}", flush=True)
    for size in reversed(sizes[1:]):
        share = (choice.size / size) ** 2
        if choice.steps * share >= recipe.sizes[size] and choice.epochs * share >= 1:
            larger = measure(replace(choice, size=size))
            choice = larger if larger.epochs >= 1 else choice
            break
    choice = begin_small_if_short(request, data, choice)
    if choice.epochs < 1:
        refuse_if_too_short(choice.cost.minutes * choice.cost.steps_per_epoch)
    return write_choice(folder / CONFIG, request, data, choice)


def sizes_with_room(request: StartRequest, data: OwnData, network: Network) -> list[int]:
    """Return the sizes to consider, whose maps have a location for each object if boxes are selected from these."""
    recipe = RECIPES[request.task]
    sizes = recipe.sizes_for(data)
    if request.task not in SELECTS_BOXES:
        return sizes
    options = {size: StartChoice(size, "", "", network).options(request.channels) for size in recipe.sizes}
    locations = {size: num_locations(request.task, data, options[size], request.overrides) for size in recipe.sizes}
    fitting = [size for size in recipe.sizes if locations[size] >= data.most_objects]
    return [size for size in sizes if size in fitting] or fitting[:1] or [max(recipe.sizes)]


def begin_small_if_short(request: StartRequest, data: OwnData, choice: StartChoice) -> StartChoice:
    """Return the choice for a run that begins with smaller images if there is time for few steps, see `SmallFirst`, and
    their maps have enough locations for the queries."""
    recipe = RECIPES[request.task]
    first = recipe.small_first
    if first is None or choice.network == "resnet50" or choice.size > min(recipe.sizes) or choice.steps >= first.below:
        return choice
    minutes = choice.cost.minutes * first.mean_cost
    epochs = int(request.training_minutes / minutes / choice.cost.steps_per_epoch)
    small = replace(choice, small_first=True, cost=replace(choice.cost, minutes=minutes), epochs=epochs)
    locations = num_locations(request.task, data, small.options(request.channels), request.overrides)
    return small if locations >= QUERIES_PER_OBJECT * data.most_objects else choice


def write_choice(path: Path, request: StartRequest, data: OwnData, choice: StartChoice) -> StartChoice:
    """Write the choices as a config; return them with its epochs, which an override may set."""
    write_start_config(path, request, data, choice)
    choice = replace(choice, epochs=load_config(path)["train"]["epochs"])
    write_start_config(path, request, data, choice)
    return choice


def write_start_config(path: Path, request: StartRequest, data: OwnData, choice: StartChoice) -> None:
    """Write the choices as a config, with the reason for each."""
    recipe = RECIPES[request.task]
    reason = "timing" if choice.cost is None else f"{60 * choice.cost.minutes:.2f} s a step"
    if choice.cost is not None and request.is_paced:
        reason += f": {pluralize(choice.steps, 'steps')} in {TRAINING_SHARE:.0%} of {request.hours:g} h"
    if larger := [size for size in recipe.sizes_for(data) if size > choice.size]:
        steps = pluralize(recipe.sizes[larger[0]], "steps")
        reason += f"; {larger[0]} pixels are chosen where they leave time for {steps} and one epoch"
    if choice.small_first:
        reason += f"; smaller at first, as there is time for fewer than {recipe.small_first.below} steps"
    if choice.freezes_res3:
        reason += f"; frozen up to res3, which halves a step's time, as there were fewer than {recipe.freeze_below}"
    about = [data.summary, f"Written by: {request.command(request.hours)}"]
    about += [f"Evidence:   {recipe.data}"] * bool(recipe.data)
    lines = [
        comment(choice.weights),
        comment(f"{choice.size} pixels: {reason}"),
        f"cfg = base({choice.options(request.channels)})",
        *data.config_lines,
        *capacity_lines(request.task, data, choice.options(request.channels), request.overrides),
        *[comment(f"{choice.precision}: the faster one of float32 and bfloat16 here")] * (len(request.precisions) > 1),
        f'cfg["train"].update(epochs={choice.epochs}, precision="{choice.precision}")',
        f'cfg["train"]["eval_every"] = {max(1, choice.epochs // NUM_EVALUATIONS)}',
    ]
    maps = maps_for_neck(request.values) if request.task == "detection" else []
    overrides = (*request.overrides, *[f"model.backbone.out_features=[{','.join(maps)}]"] * bool(maps))
    note = "; the neck takes three maps" * bool(maps)
    path.write_text(derive_config(f"start.{request.task}", about, lines, overrides, note), encoding="utf-8")


def maps_for_neck(values: Mapping[str, str]) -> list[str]:
    """Return the maps of the backbone that the command line names, if it has more than the neck takes; else []."""
    name = values.get("model.backbone", "").strip("'\"")
    if not name or any(key.startswith(("model.backbone.out_features", "model.neck")) for key in values):
        return []
    try:
        maps = _maps_of(name)
    except VitkitError:
        return []  # the config's check says what is wrong
    coarse = [name for name in maps if name in ("res3", "res4", "res5")]
    return coarse if len(maps) > len(coarse) else []


@functools.cache
def _maps_of(backbone: str) -> list[str]:
    return list(BACKBONES.build(dict(type=backbone, pretrained=False)).feature_info)


def check(path: Path, request: StartRequest) -> list[str]:
    """Print the doctor's issues, but only the number of checks that passed.

    Returns:
        how the user's own split leaks, which does not stop training, but makes the score too good.
    Raises:
        DataError: another check fails, so that training would end with an error.
    """
    issues = diagnose(path, skip=SLOW_CHECKS, device=request.device)
    print(f"{report(issues, hidden=['ok'])}; `vitkit doctor {path}` also checks {', '.join(SLOW_CHECKS)}", flush=True)
    failures = [issue for issue in issues if issue.verdict == "fail"]
    leaks = [issue.message for issue in failures if issue.check == "leakage"]
    if len(leaks) < len(failures):
        raise DataError(f"the data cannot be trained on, see above; `vitkit doctor {path}` lists everything.")
    return leaks
