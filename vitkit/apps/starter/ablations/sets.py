"""The sets of configs: which arms they have, and the commands that train them."""

import ast
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vitkit.errors import ConfigError
from vitkit.registry import nearest

Row = dict[str, Any]
"""The record of one run: set, arm, seed, epochs, steps, minutes, processor_minutes, evaluations, command, versions,
device, threads; and pretraining_minutes, of processor time, if the backbone's weights come from another run."""


@dataclass
class Ablation:
    """The fields that a set's `ablation()` returns."""

    base: str
    """The config that the arms change; an arm may have its own `base`."""
    metrics: Sequence[str]
    """The columns of the table; the first metric is plotted."""
    arms: Mapping[str, Mapping[str, Any]]
    """Name -> the arm's changes to the config, by dotted key. They override those of the command line."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the config that all arms share."""
    minutes: float | None = None
    """Processor minutes of training per arm, from which its epochs are computed; None: the epochs of its config."""
    evaluations: int = 4
    """The number of evaluations during a run."""
    curves: Mapping[str, Mapping[float, str]] | None = None
    """The plot's curves, each x -> arm, on a logarithmic axis; None: a curve for each arm, over its training."""
    x_label: str = ""
    """What x is in `curves`."""
    goal: tuple[str, float] | None = None
    """(curve, x): the point that the other curves are compared with; the table has the x at which each reaches it."""
    seeded: Sequence[str] = ()
    """Keys of the config that have the run's seed as value, in addition to train.seed."""
    power_law: bool = False
    """Whether a power law a x^-b is fitted to the first metric of each of the `curves`."""
    frontier: Mapping[str, tuple[float, float]] | None = None
    """Arm -> its model's parameters N and its training's tokens D, to fit L(N, D) to the first metric and to read off
    the best N and D for an amount of compute; None: no fit."""
    least_loss: float = 0.0
    """The loss that no model can be below, for that fit."""


_KEYS = f"dict({', '.join(f'{item.name}=…' for item in fields(Ablation))})"


def _sets_folder() -> Path:
    return Path(find_spec("vitkit.configs.ablations").submodule_search_locations[0])


def set_files() -> list[Path]:
    """List the files of the installed sets."""
    return sorted(path for path in _sets_folder().glob("*.py") if path.name != "__init__.py")


def find_set(name: str) -> Path:
    """Return the file of a set.

    Raises:
        ConfigError: there is no set of that name.
    """
    path = Path(name) if name.endswith(".py") else _sets_folder() / f"{name}.py"
    if not path.is_file():
        raise ConfigError(f"no set {name!r}. {nearest(name, [path.stem for path in set_files()])}")
    return path


def name_of(path: Path) -> str:
    """Return what `find_set` finds a set's file by."""
    return path.stem if path.parent == _sets_folder() else str(path)


def read_set(path: Path) -> Ablation:
    """Return the set in a file.

    Raises:
        ConfigError: the file has no function `ablation()` that returns the fields of a set.
    """
    try:
        ablation = Ablation(**runpy.run_path(str(path))["ablation"]())
    except (KeyError, TypeError, SyntaxError) as error:
        raise ConfigError(f"{path}: expected a function ablation() that returns {_KEYS} ({error}).") from error
    if ablation.power_law and not ablation.curves:
        raise ConfigError(f"{path}: power_law is fitted to curves; give curves=dict(name={{x: arm, …}}).")
    for arm in ablation.frontier or ():
        if arm not in ablation.arms:
            raise ConfigError(f"{path}: frontier: no arm {arm!r}. {nearest(arm, ablation.arms)}")
    if ablation.goal and (ablation.curves or {}).get(ablation.goal[0], {}).get(ablation.goal[1]) is None:
        raise ConfigError(f"{path}: goal={ablation.goal!r}: expected the name of one of the curves, and an x of it.")
    return ablation


def summary_of(path: Path) -> str:
    """Return the first paragraph of a set's docstring, in one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def train_command(ablation: Ablation, arm: str, overrides: Sequence[str]) -> list[str]:
    """Return the command that trains an arm."""
    changes = dict(ablation.arms[arm])
    base = changes.pop("base", ablation.base)

    def texts(values: Mapping[str, Any]) -> list[str]:
        return [f"{key}={value if isinstance(value, str) else repr(value)}" for key, value in values.items()]

    return ["vitkit", "train", base, *texts(ablation.settings), *overrides, *texts(changes)]


def check_names(ablation: Ablation, arms: Sequence[str], name: str) -> None:
    """Raise a ConfigError if an arm is not in a set, whose file has this name."""
    for arm in arms:
        if arm not in ablation.arms:
            raise ConfigError(f"--arms: no arm {arm!r} in {name}. {nearest(arm, ablation.arms)}")


def check_arms(ablation: Ablation, arms: Sequence[str], overrides: Sequence[str]) -> None:
    """Check the configs of all arms before the first one is trained.

    Raises:
        ConfigError: the config of an arm is wrong.
    """
    from vitkit.config import load_config  # loads torch, which a list of the sets need not wait for

    for arm in arms:
        base, *changes = train_command(ablation, arm, overrides)[2:]
        changes += [f"{key}=0" for key in ablation.seeded]
        try:
            load_config(base, changes)
        except ConfigError as error:
            raise ConfigError(f"arm {arm!r}: {error}") from error
