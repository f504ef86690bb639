"""Show where the time of a real-time model's training step goes: forward, loss, matching, backward and optimizer.

The ratio is the share of the whole step. On a GPU, the time in which it computes shows how much of a step is launches,
and the step is also measured with the model compiled, as by train.compile, and with the criterion compiled as well.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from vitkit import build_model
from vitkit.configs import dfine, rf_detr, rtdetr
from vitkit.engine.optimizers import parameter_groups
from vitkit.registry import CRITERIA
from vitkit.structures import UncompiledTargets
from vitkit.tools.benchmark.models import Case, random_batch, targets_of
from vitkit.tools.benchmark.timing import Measurement, Options, seconds_of

MODELS: dict[str, tuple[Callable[[], dict], int]] = {
    "D-FINE-N": (partial(dfine.config, "n"), 640),
    "D-FINE-S": (partial(dfine.config, "s"), 640),
    "RF-DETR-N": (partial(rf_detr.config, "n"), 384),
    "RT-DETR-R18": (partial(rtdetr.config, 18), 640),
}
"""Name -> config, and the side of the images."""
NUM_CLASSES = 80
PARTS = ("backbone", "neck", "head", "rest of forward", "loss", "matching", "backward", "clipping and optimizer")


class TimedStep:
    """A training step that adds up the seconds of its parts.

    Args:
        compiled: "model", "criterion" or both.
    """

    def __init__(self, make_config: Callable[[], dict], case: Case, options: Options, *, compiled: Sequence[str] = ()):
        torch.manual_seed(0)
        config = make_config()
        self.options = options
        self.seconds: dict[str, float] = defaultdict(float)
        self.model = build_model(config["model"] | dict(num_classes=NUM_CLASSES)).to(options.device).train()
        self.criterion = CRITERIA.build(config["criterion"]).to(options.device)
        groups = parameter_groups(self.model, lr=1e-4, backbone_lr=1e-5, weight_decay=1e-4)
        self.optimizer = torch.optim.AdamW(groups, fused=True)
        batch = random_batch(case, NUM_CLASSES, options.device)
        self.images = batch.images
        self.targets = targets_of(batch, masks="masks" in self.criterion.needs_targets)
        modules = {"model": self.model, "criterion": self.criterion}
        self.called = {name: torch.compile(m) if name in compiled else m for name, m in modules.items()}
        self.measures_parts = False

    def watch(self) -> None:
        """Measure the parts from now on, which lets the device wait between them."""
        self.measures_parts = True
        modules = {name: getattr(self.model, name) for name in ("backbone", "neck", "head")}
        for name, module in (modules | {"matching": self.criterion.matcher}).items():
            starts: list[float] = []
            module.register_forward_pre_hook(lambda *_, starts=starts: starts.append(self.now()))
            module.register_forward_hook(lambda *_, starts=starts, name=name: self.add(name, self.now() - starts.pop()))

    def now(self) -> float:
        """Return the time once the device has finished; 0 if the parts are not measured."""
        if not self.measures_parts:
            return 0.0
        if self.options.device == "cuda":
            torch.cuda.synchronize()
        return self.options.clock()

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] += seconds

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure a `with` block."""
        start = self.now()
        yield
        self.add(name, self.now() - start)

    def __call__(self) -> dict[str, float]:
        """Train on the batch; return the seconds of each of `PARTS`."""
        self.seconds.clear()
        known = {"targets": UncompiledTargets(self.targets)} if self.model.uses_targets else {}
        with self.options.autocast():
            with self.timed("forward"):
                outputs = self.called["model"](self.images, None, **known)
            with self.timed("loss"):
                loss: Tensor = sum(self.called["criterion"](outputs, self.targets).values())
        with self.timed("backward"):
            loss.backward()
        with self.timed("clipping and optimizer"):
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        seconds = self.seconds
        modules = sum(seconds[name] for name in ("backbone", "neck", "head"))
        seconds["rest of forward"] = seconds.pop("forward") - modules
        seconds["loss"] -= seconds["matching"]
        return {name: seconds[name] for name in PARTS}


def measure(part: str, options: Options) -> list[Measurement]:
    """Measure the parts of each model's step."""
    rows = []
    for name, (make_config, side) in MODELS.items():
        case = Case(side, side, batch_size=16 if options.device == "cuda" else 2, training=True)
        what = f"{name}, {case}"
        step = TimedStep(make_config, case, options)
        step.watch()
        rounds = [step() for _ in range(options.repeats + 1)][1:]
        whole = statistics.median(sum(seconds.values()) for seconds in rounds)
        for part_name in PARTS:
            shares = [seconds[part_name] / sum(seconds.values()) for seconds in rounds]
            seconds = statistics.median(seconds[part_name] for seconds in rounds)
            rows.append(Measurement(what, part_name, seconds, statistics.median(shares)))
        rows.append(Measurement(what, "whole step", whole, 1.0))
        if options.device == "cuda":
            rows += gpu_rows(what, make_config, case, options)
    return rows


def gpu_rows(what: str, make_config: Callable[[], dict], case: Case, options: Options) -> list[Measurement]:
    """Return the step without waiting between its parts, the time in which the GPU computes, and compiled steps."""
    rows: list[Measurement] = []
    variants = {"no waiting": (), "model compiled": ("model",), "model and criterion compiled": ("model", "criterion")}
    for name, compiled in variants.items():
        step = TimedStep(make_config, case, options, compiled=compiled)
        # The first calls compile, and prepare the optimizer.
        seconds = statistics.median([seconds_of(step, options) for _ in range(options.repeats + 3)][3:])
        reference = rows[0].seconds if rows else seconds
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            seconds_of(step, options)
        busy = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6
        rows.append(Measurement(what, name, seconds, seconds / reference))
        rows.append(Measurement(what, f"{name}: GPU computes", busy, busy / seconds))
    return rows
