"""Checks of what a run would do with the data; each takes a case and yields issues."""

import contextlib
import copy
import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.apps.analysis.memory import OPTIMIZER_STATES, saved_bytes, training_memory
from vitkit.apps.datasets.object_counts import describe_few_queries, with_margin
from vitkit.apps.doctor.doctor_input import DoctorCase
from vitkit.apps.doctor.environment import total_memory
from vitkit.apps.doctor.issues import VERDICTS, Issue, percent
from vitkit.apps.doctor.statistics import DatasetStatistics
from vitkit.data.loading.batch_augmentation import Squares, squash
from vitkit.data.loading.loader import BatchLoader
from vitkit.devices import autocast
from vitkit.engine.build import build_criterion
from vitkit.engine.optimizers import describe_unmatched
from vitkit.engine.settings import slow_precision
from vitkit.engine.step import training_inputs
from vitkit.errors import VitkitError
from vitkit.nn.lora import LoRA
from vitkit.protocols.model import child
from vitkit.registry import EVALUATORS, OPTIMIZERS, parameters_of
from vitkit.structures import Batch
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit.apps.doctor")
_LOG_SECONDS = 5.0
"""Seconds between the progress lines of the overfit check."""
_NUM_SAMPLES = 48
"""Number of samples whose sizes are measured."""
_MAX_BATCHES = 20  # number of batches searched for one with an object
_GIB = 2**30


class StepsNeeded(NamedTuple):
    """Numbers of optimizer steps for training a model with random heads."""

    minimum: int
    """Optimizer steps of the smallest runs that learned anything at all (configs/quickstart, configs/bccd)."""
    published: int
    """Optimizer steps of the published run, which starts from a pretrained backbone."""
    source: str


STEPS_NEEDED = {
    "DETR": StepsNeeded(4000, 1_109_000, "COCO, 150 epochs of batch 16"),
    "DETRSegmentation": StepsNeeded(1000, 185_000, "COCO, 25 epochs of batch 16, from a trained DETR"),
    "DeformableDETR": StepsNeeded(1600, 184_800, "COCO, 50 epochs of batch 32"),
    "DINO": StepsNeeded(1200, 88_700, "COCO, 12 epochs of batch 16"),
    "MaskFormer": StepsNeeded(1500, 160_000, "ADE20K, batch 16"),
    "Mask2Former": StepsNeeded(1500, 160_000, "ADE20K, batch 16 (on COCO 368,750)"),
    "Classifier": StepsNeeded(500, 375_000, "ImageNet, 300 epochs of batch 1024"),
}
"""The models whose number of steps is checked."""


def weights(case: DoctorCase) -> Iterator[Issue]:
    """Check that the model can be built for these classes, and that the weights that it starts from exist."""
    yield from case.initial_model[1]


def queries(case: DoctorCase) -> Iterator[Issue]:
    """Check that no image has more objects than the model has queries."""
    num_queries = case.model_argument("num_queries")
    if not isinstance(num_queries, int):
        return
    for where, statistics in case.statistics.items():
        is_semantic = statistics.kind == "semantic"
        counts = _classes_per_image(case, where) if is_semantic else statistics.objects_per_image()
        if not counts.any():
            continue
        most, noun = int(counts.max()), "classes" if is_semantic else "objects"
        details = {"most": most, "queries": num_queries}
        if message := describe_few_queries(counts, num_queries, noun):
            verdict = "fail" if where == "data.train" else "warn"
        else:
            message = f"at most {most} {noun} in an image, {pluralize(num_queries, 'queries')}"
            verdict = "note" if most > 0.7 * num_queries else "ok"
            message += ": little to spare, since each query specializes in some locations" if verdict == "note" else ""
        yield Issue("queries", verdict, message, where, details)


def detections(case: DoctorCase) -> Iterator[Issue]:
    """Check that no image has more objects than the model returns, or than the evaluation counts of a class."""
    returned = next(filter(None, map(case.model_argument, ("num_detections", "num_instances"))), None)
    for where, statistics in case.statistics.items():
        if where == "data.train" or statistics.kind not in ("detection", "instance") or not len(statistics.labels):
            continue
        most = int(statistics.objects_per_image().max())
        if isinstance(returned, int) and most > returned:
            message = f"at most {most} objects in an image, of which the model returns {returned}: set "
            name = "num_detections" if case.model_argument("num_detections") else "num_instances"
            yield Issue("detections", "warn", f"{message}model.{name}={with_margin(most)}", where, {"most": most})
        pairs = np.stack([statistics.image_indices, statistics.labels], axis=1)
        max_of_class = int(np.unique(pairs, axis=0, return_counts=True)[1].max())
        for key, limit in _detection_limits(case.config.get("evaluator"), "evaluator"):
            if max_of_class > limit:
                message = f"at most {max_of_class} objects of a class in an image, of which the evaluation counts "
                message += f"{limit}: set {key}.max_dets={with_margin(max_of_class)}"
                yield Issue("detections", "warn", message, where, {"most": max_of_class})


def _detection_limits(spec: Any, key: str) -> Iterator[tuple[str, int]]:
    """Yield the config key of each `CocoEvaluator`, and how many detections of a class it counts in an image."""
    if isinstance(spec, list | tuple):
        for number, item in enumerate(spec):
            yield from _detection_limits(item, f"{key}.{number}")
    elif _type_name(spec) == "CombinedEvaluator":
        yield from _detection_limits(spec["evaluator"], f"{key}.evaluator")
    elif _type_name(spec) == "CocoEvaluator":
        constructor, arguments = EVALUATORS.resolve(spec)
        limits = arguments.get("max_dets", parameters_of(constructor)["max_dets"].default)
        yield key, limits if isinstance(limits, int) else limits[-1]


def _classes_per_image(case: DoctorCase, where: str) -> np.ndarray:
    """Return the number of classes in each image or, for label maps that are not listed, in each scanned image."""
    statistics = case.statistics[where]
    if len(statistics.image_indices):
        pairs = np.unique(np.stack([statistics.image_indices, statistics.labels], axis=1), axis=0)
        return np.bincount(pairs[:, 0])
    return np.array(case.scan(where).num_classes, np.int64)


def sizes_after_resizing(case: DoctorCase) -> Iterator[Issue]:
    """Report how large objects are when the model sees them, compared with the stride of its finest map."""
    stride = _finest_stride(case)
    for where, statistics in case.statistics.items():
        if statistics.dataset is None or statistics.kind not in ("detection", "instance", "panoptic"):
            continue
        squares = Squares(**case.data.squares) if where == "data.train" and case.data.squares is not None else None
        targets = [sample["target"] for sample in _samples(statistics.dataset, squares)]
        sides = [
            (target["boxes_cxcywh"][:, 2:] * torch.tensor(target["image_size"][::-1])).min(dim=1).values
            for target in targets
            if len(target["labels"])
        ]
        if not sides:
            continue
        shorter_sides = torch.cat(sides).numpy()
        num_empty = len(targets) - len(sides)
        low, median, high = np.quantile(shorter_sides, [0.05, 0.5, 0.95])
        height, width = np.median([target["image_size"] for target in targets], axis=0)
        message = f"shorter sides of objects {low:.0f} to {high:.0f} pixels (5 to 95 %), median {median:.0f}, "
        message += f"in images of about {width:.0f}x{height:.0f}"
        severities = ["ok"]
        if stride is not None:
            small = float(np.mean(shorter_sides < stride))
            message += f"; {percent(small, 1)} are smaller than a location of the finest map (stride {stride})"
            severities.append("warn" if small > 0.5 else "note" if small > 0.1 else "ok")
        if num_empty > 0.2 * len(targets):
            message += f"; {pluralize(num_empty, 'samples', 'have', of=len(targets))} no object left"
            severities.append("warn" if num_empty > 0.5 * len(targets) else "note")
        details = {"quantiles": [float(low), float(median), float(high)], "stride": stride}
        yield Issue("sizes after resizing", max(severities, key=VERDICTS.index), message, where, details)


def random_evaluation(case: DoctorCase) -> Iterator[Issue]:
    """Check that nothing is random in the transforms of validation and test images.

    Results are compared with the annotations of the image as it is, which a random crop or flip does not show.
    """
    for where, statistics in case.statistics.items():
        if where == "data.train" or not statistics.has_images:
            continue
        indices = range(min(2, len(statistics.dataset)))
        same = [is_same for index in indices for is_same in _same_with_other_seeds(statistics, index)]
        if not all(same):
            message = "its transforms are random, so that results are compared with annotations of another image: "
            message += "use EvalResize (for classes ClassificationEvalTransforms)"
            yield Issue("random evaluation", "fail", message, where)
        elif same:
            yield Issue("random evaluation", "ok", "nothing in its transforms is random", where)


def _same_with_other_seeds(statistics: DatasetStatistics, index: int) -> list[bool]:
    """Return whether an image is the same with each of a few seeds as with the first; [] if it cannot be read."""
    try:
        first, *others = (statistics.dataset[(index, seed)]["image"] for seed in range(6))
    except VitkitError:  # `images` reports it
        return []
    return [torch.equal(first, other) for other in others]


def _samples(dataset: Any, squares: Squares | None = None) -> Iterator[Mapping[str, Any]]:
    """Yield a few evenly spread transformed samples; unreadable ones are skipped, as `images` reports them."""
    for index in np.linspace(0, len(dataset) - 1, min(_NUM_SAMPLES, len(dataset))).astype(int).tolist():
        with contextlib.suppress(VitkitError):
            sample = dataset[(index, index)]
            yield sample if squares is None else squash(sample, squares.draw(0, np.random.default_rng(index)))


def _finest_stride(case: DoctorCase) -> int | None:
    model = case.initial_model[0]
    for name in ("neck", "backbone") if model is not None else ():
        part = child(model, name)
        if part is not None:
            return min(info.stride for info in part.feature_info.values())
    return None


def step_budget(case: DoctorCase) -> Iterator[Issue]:
    """Check that the number of optimizer steps is sufficient for the model."""
    if case.settings is None or case.train is None or case.train.dataset is None:
        return
    batches = len(_loader(case))
    steps = case.settings.epochs * -(-batches // (case.options.gpus * case.settings.accumulate))
    num_samples = len(case.train.dataset.training_indices())
    message = f"{pluralize(steps, 'steps')}: {pluralize(case.settings.epochs, 'epochs')} of "
    message += f"{pluralize(num_samples, 'samples')}"
    details = {"steps": steps, "samples": case.settings.epochs * num_samples}
    name = _type_name(case.config.get("model", ""))
    needed = STEPS_NEEDED.get(name)
    if needed is None or case.options.init:
        message += f", from {case.options.init}" if case.options.init else ""
        yield Issue("step budget", "ok", message, "train", details)
        return
    message += f"; the published {name} took {needed.published:,} ({needed.source}), the smallest synthetic world here "
    message += f"{needed.minimum:,}"
    if steps < needed.minimum:
        message += ". Train longer (train.epochs), or start from a trained model (--init)"
        verdict = "warn"
    else:
        has_photos = case.train.files is not None
        verdict = "note" if has_photos and steps < 0.1 * needed.published else "ok"
        message += ": from random heads it may not be enough for photos; --init needs far less" * (verdict == "note")
    yield Issue("step budget", verdict, message, "train", details)


def learning_rate(case: DoctorCase) -> Iterator[Issue]:
    """Check that the learning rate suits the number of images per step."""
    optimizer = case.config.get("optimizer")
    if case.settings is None or not isinstance(optimizer, Mapping) or "lr" not in optimizer:
        return
    lr = optimizer["lr"]
    per_step = case.data.images_per_gpu * case.settings.accumulate * case.options.gpus
    reference = case.settings.reference_batch_size
    details = {"lr": lr, "images_per_step": per_step, "reference": reference}
    if case.data.tokens_per_gpu is not None:
        yield Issue("learning rate", "ok", f"lr {lr:g}", "optimizer", details)
    elif reference is None:
        message = f"lr {lr:g} with {pluralize(per_step, 'images')} per step; train.reference_batch_size "
        message += "does not say for how many "
        yield Issue("learning rate", "note", message + "it is meant", "optimizer", details)
    elif reference == per_step:
        yield Issue(
            "learning rate",
            "ok",
            f"lr {lr:g} is meant for {pluralize(per_step, 'images')} per step",
            "optimizer",
            details,
        )
    else:
        factor = per_step / reference
        message = f"lr {lr:g} is meant for {pluralize(reference, 'images')} per step, this run has "
        message += f"{per_step}: multiply it (and "
        message += f"backbone_lr) by {factor:.3g}, or set train.accumulate so that the product fits"
        verdict = "warn" if not 0.5 <= factor <= 2 else "note"
        yield Issue("learning rate", verdict, message, "optimizer", details)
    if optimizer.get("type") in ("AdamW", "Adam") and lr > 2e-3:
        message = f"lr {lr:g} is high for {optimizer['type']}: transformers take 1e-5 to 1e-3"
        yield Issue("learning rate", "warn", message, "optimizer")


def parameter_names(case: DoctorCase) -> Iterator[Issue]:
    """Check that each name in the optimizer's options is part of the name of a parameter that is trained."""
    model, optimizer = case.initial_model[0], case.config.get("optimizer")
    if model is None or not isinstance(optimizer, Mapping):
        return
    options = {key: optimizer[key] for key in ("no_weight_decay", "lr_multipliers") if optimizer.get(key)}
    for message in describe_unmatched(model, **options):
        yield Issue("parameter names", "warn", message, "optimizer")


def precision(case: DoctorCase) -> Iterator[Issue]:
    """Check that the device is not slow in the run's precision."""
    if case.settings is None:
        return
    message = slow_precision(case.settings.precision, case.options.device)
    verdict = "warn" if message else "ok"
    yield Issue("precision", verdict, message or f"{case.settings.precision} on {case.options.device.type}", "train")


def memory(case: DoctorCase) -> Iterator[Issue]:
    """Estimate the memory of a training step from one image: saved activations, weights, gradients, optimizer."""
    model = case.initial_model[0]
    if model is None or case.settings is None or "criterion" not in case.config:
        return
    batch = _first_batch(case, images=1)
    if batch is None:
        return
    if case.settings.lora is not None:
        model = copy.deepcopy(model)  # other checks look at it without the pairs
        LoRA(**case.settings.lora).add_to(model)
    model.train()
    criterion = build_criterion(case.config["criterion"], case.train.classes).to(case.options.device)

    def step() -> Tensor:
        with autocast(case.options.device, case.settings.precision):
            return sum(criterion(model(**training_inputs(model, batch)), batch.targets).values())

    try:
        saved = saved_bytes(step, [model, criterion])
    except (VitkitError, RuntimeError, MemoryError) as error:
        yield Issue("memory", "fail", f"a training step ends with {type(error).__name__}: {error}", "train")
        return
    has_images = "images" in batch.inputs
    activations = saved * (_largest_ratio(case, batch) * case.data.images_per_gpu if has_images else 1)
    sharded = case.settings.strategy == "fsdp"
    states = OPTIMIZER_STATES.get(_type_name(case.config.get("optimizer", "")), 2)
    parameters = training_memory(model, states=states, gpus=case.options.gpus, sharded=sharded)
    fixed = parameters.total + (parameters.weights if case.settings.ema_decay is not None else 0)
    # Allowance for kernel workspaces, allocator fragmentation, and temporary gradients of activations.
    total = fixed + 1.25 * activations
    message = f"about {total / _GIB:.2g} GiB a process: weights, gradients and optimizer {fixed / _GIB:.2g}"
    message += f" (sharded over {case.options.gpus}), " if sharded else ", "
    message += (
        f"activations of {pluralize(case.data.images_per_gpu, 'images')} of the largest size {activations / _GIB:.2g}, "
    )
    message += "a quarter of them for workspaces"
    capacity, name = _capacity(case)
    details = {"bytes": int(total), "fixed": int(fixed), "activations": int(activations), "capacity": capacity}
    verdict = "ok"
    if capacity is not None:
        verdict = "fail" if total > capacity else "warn" if total > 0.85 * capacity else "ok"
        message += f"; {name} has {capacity / _GIB:.3g} GiB"
    if verdict != "ok":
        message += ". To use less: data.images_per_gpu with train.accumulate, train.activation_checkpointing=true, "
        message += "train.precision=bf16, smaller images, train.strategy=fsdp"
    yield Issue("memory", verdict, message, "train", details)


def _type_name(spec: Any) -> str:
    """Return the registered name in a spec; of None, nothing."""
    return spec.get("type", "") if isinstance(spec, Mapping) else spec or ""


def _largest_ratio(case: DoctorCase, batch: Batch) -> float:
    """Return the size of the largest padded training image relative to the batch's image, in pixels."""
    sizes = [tuple(batch.inputs["images"].shape[-2:])]
    if case.data.squares is not None:
        return Squares(**case.data.squares).largest ** 2 / math.prod(sizes[0])
    sizes += [tuple(sample["image"].shape[-2:]) for sample in _samples(case.train.dataset)]
    groups = [[size for size in sizes if (size[1] >= size[0]) is wide] for wide in (True, False)]
    if not case.data.aspect_ratio_grouping:
        groups = [sizes]
    # The images of a batch are padded to the largest height and the largest width among them.
    padded = [max(h for h, _ in group) * max(w for _, w in group) for group in groups if group]
    return max(padded) / math.prod(sizes[0])


def _capacity(case: DoctorCase) -> tuple[int | None, str]:
    if case.options.memory_gib is not None:
        return round(case.options.memory_gib * _GIB), "the device"
    if (memory := total_memory(case.options.device)) is not None:
        return memory, "the GPU"
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            values = dict(line.split(":", 1) for line in file)
        return int(values["MemAvailable"].split()[0]) * 1024, "this machine"
    except (OSError, KeyError, ValueError):
        return None, ""


def overfit(case: DoctorCase) -> Iterator[Issue]:
    """Train on one repeated batch: if labels, model, losses and learning rate are correct, the loss comes near zero."""
    model = case.initial_model[0]
    if model is None or case.settings is None or not {"criterion", "optimizer"} <= case.config.keys():
        return
    batch = _first_batch(case, images=min(case.data.images_per_gpu, 2))
    if batch is None:
        yield Issue("overfit", "warn", "not tried: no batch with an object was found, or could be read", "train")
        return
    torch.manual_seed(case.settings.seed)
    criterion = build_criterion(case.config["criterion"], case.train.classes).to(case.options.device).eval()
    optimizer = OPTIMIZERS.build(case.config["optimizer"], model=model)
    _disable_dropout(model)
    losses: list[float] = []
    terms: dict[str, float] = {}
    start = logged = time.monotonic()
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(case.options.overfit_steps + 1):
        with autocast(case.options.device, case.settings.precision):
            # The model gets no targets: the noise that it adds to them would differ in every step.
            batch_losses = criterion(model(**batch.inputs), batch.targets)
            loss = sum(batch_losses.values())
        losses.append(float(loss.detach()))
        terms = {name: float(value.detach()) for name, value in batch_losses.items() if not name.startswith("aux")}
        now = time.monotonic()
        if now - logged > _LOG_SECONDS:
            logged = now
            limits = f"of at most {case.options.overfit_steps}, {now - start:.0f} s of {case.options.overfit_seconds:g}"
            logger.info("overfit: step %d %s, loss %.4g (at first %.4g)", step, limits, losses[-1], losses[0])
        is_last = step == case.options.overfit_steps or now - start > case.options.overfit_seconds
        if is_last or not math.isfinite(losses[-1]):
            break
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * min(1.0, (step + 1) / 20)
        loss.backward()
        if case.settings.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.settings.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    yield _judge_overfit(losses, terms, batch, start)


def _judge_overfit(losses: list[float], terms: dict[str, float], batch: Batch, start: float) -> Issue:
    num_steps, initial_loss, final_loss = len(losses) - 1, losses[0], losses[-1]
    listed = ", ".join(f"{name} {value:.3g}" for name, value in terms.items())
    message = f"the loss of one batch of {len(batch)} went from {initial_loss:.4g} to {final_loss:.3g} "
    message += f"in {pluralize(num_steps, 'steps')} "
    message += f"({time.monotonic() - start:.0f} s; {listed})"
    details = {"first": initial_loss, "last": final_loss, "steps": num_steps, "terms": terms}
    ratio = final_loss / initial_loss if initial_loss else 0.0
    if not math.isfinite(final_loss):
        bad = [name for name, value in terms.items() if not math.isfinite(value)]
        return Issue("overfit", "fail", f"{message}: {', '.join(bad)} is not finite", "train", {"steps": num_steps})
    if ratio < 0.15:
        return Issue("overfit", "ok", message, "train", details)
    if ratio < 0.8 and losses[-1] < min(losses[: max(1, 3 * len(losses) // 4)]):
        return Issue("overfit", "note", f"{message}: it falls, but it needs more steps to be sure", "train", details)
    if ratio < 0.8:
        return Issue("overfit", "warn", f"{message}: it stops falling", "train", details)
    if num_steps < 20:
        return Issue("overfit", "note", f"{message}: too few steps in that time to be sure", "train", details)
    return Issue("overfit", "fail", f"{message}: it does not fall. Check labels and learning rate", "train", details)


def _disable_dropout(model: nn.Module) -> None:
    """Set evaluation mode except for batch norms, which need the batch's statistics while weights are random."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()


def _loader(case: DoctorCase, **changes: Any) -> BatchLoader:
    data = dataclasses.replace(case.data, num_workers=0, pin_memory=False, **changes)
    return data.train_loader(case.train.dataset, case.settings.seed)


def _first_batch(case: DoctorCase, *, images: int) -> Batch | None:
    """Return the first training batch with an object, moved to the device; None without one."""
    loader = _loader(case, images_per_gpu=images)
    try:
        for number, batch in enumerate(loader):
            labels = [target["labels"] for target in batch.targets if "labels" in target]
            if not labels or all(map(len, labels)):
                return batch.to(case.options.device)
            if number == _MAX_BATCHES:
                return None
    except VitkitError:
        return None  # `images` reports what cannot be read
    return None
