"""Checks of what a run would do with the data: each takes a case and gives its findings."""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.analysis import OPTIMIZER_STATES, kept_bytes, training_memory
from vitkit.data.loader import Loader
from vitkit.doctor.case import Case
from vitkit.doctor.findings import Finding, percent
from vitkit.engine.evaluate import autocast
from vitkit.errors import VitkitError
from vitkit.registry import CRITERIA, OPTIMIZERS
from vitkit.structures import Batch

_SAMPLES = 48
"""Training samples that sizes are taken of."""
_MOST_BATCHES = 20  # looked through for one with an object
_GIB = 2**30


class Need(NamedTuple):
    """How long a model has to be trained from random heads."""

    least: int
    """Optimiser steps that the smallest runs took which learned anything (configs/quickstart, configs/bccd)."""
    published: int
    """Optimiser steps of the published run, from a pretrained backbone."""
    source: str


STEPS_NEEDED = {
    "DETR": Need(4000, 1_109_000, "COCO, 150 epochs of batch 16"),
    "DETRSegmentation": Need(1000, 185_000, "COCO, 25 epochs of batch 16, from a trained DETR"),
    "DeformableDETR": Need(1600, 184_800, "COCO, 50 epochs of batch 32"),
    "MaskClassification": Need(1500, 160_000, "ADE20K, batch 16 (Mask2Former; on COCO 368,750)"),
    "Classifier": Need(500, 375_000, "ImageNet, 300 epochs of batch 1024"),
}
"""Other models are not judged."""


def weights(case: Case) -> Iterator[Finding]:
    """The model can be built for these classes, and the weights that it starts from are there."""
    yield from case.start[1]


def queries(case: Case) -> Iterator[Finding]:
    """No image has more objects than the model has queries."""
    num_queries = case.model_argument("num_queries")
    if not isinstance(num_queries, int):
        return
    for where, survey in case.surveys.items():
        if survey.kind == "semantic":
            most, what = _most_classes(case, where), "classes"
        elif len(survey.owners):
            most, what = int(survey.objects_per_image().max()), "objects"
        else:
            continue
        details = {"most": most, "queries": num_queries}
        message = f"at most {most} {what} in an image, {num_queries} queries"
        if most > num_queries:
            counts = survey.objects_per_image()
            images = int((counts > num_queries).sum())
            message += f": in {images} images some can never be found; set model.num_queries={_round_up(most)}"
            verdict = "fail" if where == "data.train" else "warn"
        else:
            verdict = "note" if most > 0.7 * num_queries else "ok"
            message += ": little to spare, since not every query answers for every place" if verdict == "note" else ""
        yield Finding("queries", verdict, message, where, details)


def _most_classes(case: Case, where: str) -> int:
    survey, most = case.surveys[where], 0
    if len(survey.owners):
        return max(len(set(survey.labels[survey.owners == k])) for k in np.unique(survey.owners))
    # Of semantic folders: no image shows more classes than are seen anywhere.
    most = sum(1 for label in case.pictures(where).label_images if label < len(survey.classes))
    return most


def _round_up(count: int) -> int:
    return math.ceil(1.3 * count / 10) * 10


def sizes_after_resizing(case: Case) -> Iterator[Finding]:
    """How large objects are when the model sees them, against the places of its finest map."""
    for where, survey in case.surveys.items():
        if survey.dataset is None or survey.kind not in ("detection", "instance", "panoptic"):
            continue
        shorter, sizes, empty, total = [], [], 0, min(_SAMPLES, len(survey.image_ids))
        for index in np.linspace(0, len(survey.image_ids) - 1, total).astype(int).tolist():
            try:
                target = survey.dataset[(index, index)]["target"]
            except VitkitError:
                continue  # `images` names it
            height, width = target["image_size"]
            extents = target["boxes_cxcywh"][:, 2:] * torch.tensor([width, height])
            shorter += extents.min(dim=1).values.tolist()
            sizes.append((height, width))
            empty += not len(extents)
        if not shorter:
            continue
        stride = _finest_stride(case)
        low, middle, high = np.quantile(shorter, [0.05, 0.5, 0.95])
        (height, width) = np.median(sizes, axis=0)
        message = f"shorter sides of objects {low:.0f} to {high:.0f} pixels (5 to 95 %), {middle:.0f} in the middle, "
        message += f"in images of about {width:.0f}x{height:.0f}"
        verdict = "ok"
        if stride is not None:
            small = float(np.mean(np.array(shorter) < stride))
            message += f"; {percent(small, 1)} are smaller than a place of the finest map (stride {stride})"
            verdict = "warn" if small > 0.5 else "note" if small > 0.1 else "ok"
        if empty > 0.2 * total:
            message += f"; {empty} of {total} samples have no object left"
            verdict = "warn" if empty > 0.5 * total else max(verdict, "note", key=["ok", "note", "warn"].index)
        details = {"quantiles": [float(low), float(middle), float(high)], "stride": stride}
        yield Finding("sizes after resizing", verdict, message, where, details)


def _finest_stride(case: Case) -> int | None:
    model = case.start[0]
    for part in ("neck", "backbone"):
        infos = getattr(getattr(model, part, None), "feature_info", None)
        if infos:
            return min(info.stride for info in infos.values())
    return None


def step_budget(case: Case) -> Iterator[Finding]:
    """Enough optimiser steps for such a model."""
    if case.settings is None or case.train is None or case.train.dataset is None:
        return
    batches = len(_loader(case))
    steps = case.settings.epochs * -(-batches // (case.options.gpus * case.settings.accumulate))
    images = case.settings.epochs * len(case.train.dataset)
    message = f"{steps:,} steps: {case.settings.epochs} epochs of {len(case.train.dataset):,} samples"
    details = {"steps": steps, "samples": images}
    name = case.config["model"] if isinstance(case.config.get("model"), str) else case.config.get("model", {})
    name = name.get("type") if isinstance(name, Mapping) else name
    need = STEPS_NEEDED.get(name)
    if need is None or case.options.init:
        message += f", from {case.options.init}" if case.options.init else ""
        yield Finding("step budget", "ok", message, "train", details)
        return
    message += f"; the published {name} took {need.published:,} ({need.source}), the smallest synthetic world here "
    message += f"{need.least:,}"
    if steps < need.least:
        message += ". Train longer (train.epochs), or start from a trained model (--init)"
        verdict = "warn"
    else:
        real = case.train.files is not None
        verdict = "note" if real and steps < 0.1 * need.published else "ok"
        message += ": from random heads it may not be enough for photos; --init needs far less" * (verdict == "note")
    yield Finding("step budget", verdict, message, "train", details)


def learning_rate(case: Case) -> Iterator[Finding]:
    """The learning rate is meant for as many images per step as there are."""
    optimizer = case.config.get("optimizer")
    if case.settings is None or not isinstance(optimizer, Mapping) or "lr" not in optimizer:
        return
    lr = optimizer["lr"]
    per_step = case.data.images_per_gpu * case.settings.accumulate * case.options.gpus
    reference = case.settings.reference_batch_size
    details = {"lr": lr, "images_per_step": per_step, "reference": reference}
    if case.data.tokens_per_gpu is not None:
        yield Finding("learning rate", "ok", f"lr {lr:g}", "optimizer", details)
    elif reference is None:
        message = f"lr {lr:g} with {per_step} images per step; train.reference_batch_size does not say for how many "
        yield Finding("learning rate", "note", message + "it is meant", "optimizer", details)
    elif reference == per_step:
        yield Finding("learning rate", "ok", f"lr {lr:g} is meant for {per_step} images per step", "optimizer", details)
    else:
        factor = per_step / reference
        message = f"lr {lr:g} is meant for {reference} images per step, this run has {per_step}: multiply it (and "
        message += f"backbone_lr) by {factor:.3g}, or set train.accumulate so that the product fits"
        verdict = "warn" if not 0.5 <= factor <= 2 else "note"
        yield Finding("learning rate", verdict, message, "optimizer", details)
    if optimizer.get("type") in ("AdamW", "Adam") and lr > 2e-3:
        message = f"lr {lr:g} is high for {optimizer['type']}: transformers take 1e-5 to 1e-3"
        yield Finding("learning rate", "warn", message, "optimizer")


def memory(case: Case) -> Iterator[Finding]:
    """The memory of a training step, estimated from one image's: what autograd keeps, weights, gradients, optimiser."""
    model = case.start[0]
    if model is None or case.settings is None or "criterion" not in case.config:
        return
    batch = _first_batch(case, images=1)
    if batch is None:
        return
    model.train()
    criterion = CRITERIA.build(case.config["criterion"]).to(case.options.device)

    def step(inputs: dict[str, Tensor], targets: list) -> Tensor:
        with autocast(case.options.device, case.settings.precision):
            return sum(criterion(model(**inputs), targets).values())

    try:
        kept = kept_bytes(lambda: step(batch.inputs, batch.targets), [model, criterion])
    except (VitkitError, RuntimeError, MemoryError) as error:
        yield Finding("memory", "fail", f"a training step ends with {type(error).__name__}: {error}", "train")
        return
    share = _largest_share(case, batch)
    activations = kept * share * (case.data.images_per_gpu if "images" in batch.inputs else 1)
    divided = case.settings.strategy == "fsdp"
    own = training_memory(model, states=_optimizer_states(case), gpus=case.options.gpus, divided=divided)
    fixed = own.total + (own.weights if case.settings.ema_decay is not None else 0)
    # Workspaces of kernels, the allocator's gaps, and gradients of activations, which come and go.
    total = fixed + 1.25 * activations
    message = f"about {total / _GIB:.2g} GiB a process: weights, gradients and optimiser {fixed / _GIB:.2g}"
    message += f" (divided among {case.options.gpus}), " if divided else ", "
    message += f"activations of {case.data.images_per_gpu} images of the largest size {activations / _GIB:.2g}, "
    message += "a quarter of them for workspaces"
    capacity, name = _capacity(case)
    details = {"bytes": int(total), "fixed": int(fixed), "activations": int(activations), "capacity": capacity}
    verdict = "ok"
    if capacity is not None:
        verdict = "fail" if total > capacity else "warn" if total > 0.85 * capacity else "ok"
        message += f"; {name} has {capacity / _GIB:.3g} GiB"
    if verdict != "ok":
        message += ". Less by data.images_per_gpu with train.accumulate, train.activation_checkpointing=true, "
        message += "train.precision=bf16, smaller images, train.strategy=fsdp"
    yield Finding("memory", verdict, message, "train", details)


def _optimizer_states(case: Case) -> int:
    """Numbers that the optimiser keeps for each weight."""
    optimizer = case.config.get("optimizer", {})
    name = optimizer if isinstance(optimizer, str) else optimizer.get("type", "")
    return OPTIMIZER_STATES.get(name, 2)


def _largest_share(case: Case, batch: Batch) -> float:
    """How much larger than the batch's image the largest training image is, in pixels."""
    if "images" not in batch.inputs:
        return 1.0
    sizes = [tuple(batch.inputs["images"].shape[-2:])]
    for index in np.linspace(0, len(case.train.dataset) - 1, min(_SAMPLES, len(case.train.dataset))).astype(int):
        try:
            sizes.append(tuple(case.train.dataset[(int(index), int(index))]["image"].shape[-2:]))
        except VitkitError:
            continue
    groups = {wide: [size for size in sizes if (size[1] >= size[0]) is wide] for wide in (True, False)}
    if not case.data.aspect_ratio_grouping:
        groups = {None: sizes}
    # Images of a batch are padded to the largest height and the largest width among them.
    padded = [max(h for h, _ in group) * max(w for _, w in group) for group in groups.values() if group]
    return max(padded) / math.prod(sizes[0])


def _capacity(case: Case) -> tuple[int | None, str]:
    if case.options.memory_gib is not None:
        return round(case.options.memory_gib * _GIB), "the device"
    if case.options.device.type == "cuda":
        return torch.cuda.get_device_properties(case.options.device).total_memory, "the GPU"
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            values = dict(line.split(":", 1) for line in file)
        return int(values["MemAvailable"].split()[0]) * 1024, "this machine"
    except (OSError, KeyError, ValueError):
        return None, ""


def overfit(case: Case) -> Iterator[Finding]:
    """One batch, again and again: its loss comes near zero, if labels, model, losses and learning rate are sound."""
    model = case.start[0]
    if model is None or case.settings is None or not {"criterion", "optimizer"} <= case.config.keys():
        return
    batch = _first_batch(case, images=min(case.data.images_per_gpu, 2))
    if batch is None:
        yield Finding("overfit", "warn", "no batch has an object to learn", "train")
        return
    torch.manual_seed(case.settings.seed)
    criterion = CRITERIA.build(case.config["criterion"]).to(case.options.device).eval()
    optimizer = OPTIMIZERS.build(case.config["optimizer"], model=model)
    _without_noise(model)
    losses: list[float] = []
    terms: dict[str, float] = {}
    start = time.monotonic()
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(case.options.overfit_steps + 1):
        with autocast(case.options.device, case.settings.precision):
            found = criterion(model(**batch.inputs), batch.targets)
            loss = sum(found.values())
        losses.append(float(loss.detach()))
        terms = {name: float(value.detach()) for name, value in found.items() if not name.startswith("aux")}
        ended = step == case.options.overfit_steps or time.monotonic() - start > case.options.overfit_seconds
        if ended or not math.isfinite(losses[-1]):
            break
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * min(1.0, (step + 1) / 20)
        loss.backward()
        if case.settings.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.settings.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    yield _judge_overfit(losses, terms, batch, start)


def _judge_overfit(losses: list[float], terms: dict[str, float], batch: Batch, start: float) -> Finding:
    steps, first, last = len(losses) - 1, losses[0], losses[-1]
    listed = ", ".join(f"{name} {value:.3g}" for name, value in terms.items())
    message = f"the loss of one batch of {len(batch)} went from {first:.4g} to {last:.3g} in {steps} steps "
    message += f"({time.monotonic() - start:.0f} s; {listed})"
    details = {"first": first, "last": last, "steps": steps, "terms": terms}
    left = last / first if first else 0.0
    if not math.isfinite(last):
        bad = [name for name, value in terms.items() if not math.isfinite(value)]
        return Finding("overfit", "fail", f"{message}: {', '.join(bad)} is not finite", "train", {"steps": steps})
    if left < 0.15:
        return Finding("overfit", "ok", message, "train", details)
    if left < 0.8 and losses[-1] < min(losses[: max(1, 3 * len(losses) // 4)]):
        return Finding("overfit", "note", f"{message}: it falls, and more steps would tell more", "train", details)
    if left < 0.8:
        return Finding("overfit", "warn", f"{message}: it does not go on falling", "train", details)
    if steps < 20:
        return Finding("overfit", "note", f"{message}: too few steps in that time to tell", "train", details)
    return Finding("overfit", "fail", f"{message}: it does not fall. Check labels and learning rate", "train", details)


def _without_noise(model: nn.Module) -> None:
    """No dropout: it would keep the loss up. Batch norms need the batch's statistics where weights are random."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()


def _loader(case: Case, **changes: Any) -> Loader:
    data = dataclasses.replace(case.data, num_workers=0, pin_memory=False, **changes)
    return data.train_loader(case.train.dataset, case.settings.seed)


def _first_batch(case: Case, *, images: int) -> Batch | None:
    """The first training batch in which there is anything to learn, on the device."""
    loader = _loader(case, images_per_gpu=images)
    try:
        for number, batch in enumerate(loader):
            labels = [target["labels"] for target in batch.targets if "labels" in target]
            if not labels or all(map(len, labels)):
                return batch.to(case.options.device)
            if number == _MOST_BATCHES:
                return None
    except VitkitError:
        return None  # `images` names what cannot be read
    return None
