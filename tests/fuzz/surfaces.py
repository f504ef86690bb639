"""All formats whose input is broken, and running their cases."""

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path

from fuzz.formats import Format
from fuzz.isolation import Outcome, run_isolated
from fuzz.world import make_world

_MODULES = ("annotations", "images", "checkpoints", "transformers_folders", "features", "texts", "results", "configs")
_MODULES += ("videos", "foreign_annotations", "pages", "downloads", "exported_programs", "starts", "packaged")
_MODULES += ("located_texts",)
FORMATS: dict[str, Format] = {kind.name: kind for name in _MODULES for kind in import_module(f"fuzz.{name}").FORMATS}
CORPUS = Path(__file__).resolve().parents[1] / "corpus"
TOGETHER = 20
"""Cases that run in one process."""
CASE_FOLDERS = sorted(path for path in CORPUS.glob("*/*") if path.is_dir() and path.parent.name in FORMATS)


def seeds_of(kind: Format, cases: int, first: int = 0, formats: Iterable[Format] = FORMATS.values()) -> range:
    """Return the seeds of a format's part of all cases."""
    shares = sum(other.share for other in formats)
    return range(first, first + -(-cases * kind.share // shares))


@cache
def warm_up(kind: Format) -> None:
    """Do once what every process of a format's cases needs."""
    with tempfile.TemporaryDirectory() as name:
        kind.warm_up(make_world(Path(name, "world")), Path(name))


def run_seeds(
    kind: Format,
    seeds: range,
    world: Path,
    folder: Path,
    keep: Path | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> tuple[Counter[str], list[str]]:
    """Return the number of cases by outcome, and descriptions of those that failed.

    Args:
        keep: where the files of those that failed are copied to.
        tell: called with each description as soon as a case failed.
    """
    warm_up(kind)
    counts: Counter[str] = Counter()
    failures = []
    for first in range(0, len(seeds), TOGETHER):
        part = seeds[first : first + TOGETHER]
        folders = [folder / f"case{seed}" for seed in part]
        for case_folder in folders:
            case_folder.mkdir()
        outcomes = run_isolated([partial(write_and_check, kind, seed, world) for seed in part], folders, kind.error)
        for seed, case_folder, outcome in zip(part, folders, outcomes, strict=True):
            counts[outcome.kind] += 1
            if not outcome.ended_well:
                failures.append(f"{kind.name}, seed {seed}: {outcome.kind}: {outcome.message}")
                tell(failures[-1])
                if keep is not None:
                    _keep(kind, seed, world, keep / kind.name / str(seed), failures[-1])
            shutil.rmtree(case_folder)
    return counts, failures


def write_and_check(kind: Format, seed: int, world: Path, folder: Path) -> None:
    """Write the case of a seed and check it."""
    kind.write(random.Random(f"{kind.name} {seed}"), folder, world)
    kind.check(folder, world)


def check_folders(kind: Format, sources: Sequence[Path], world: Path, folder: Path) -> list[Outcome]:
    """Check copies of cases that were kept."""
    warm_up(kind)
    folders = [Path(shutil.copytree(source, folder / source.name)) for source in sources]
    return run_isolated([partial(kind.check, world=world)] * len(sources), folders, kind.error)


def _keep(kind: Format, seed: int, world: Path, kept: Path, description: str) -> None:
    """Write the case again, as it was before it was checked."""
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    here = Path.cwd()
    try:
        os.chdir(kept)
        kind.write(random.Random(f"{kind.name} {seed}"), kept, world)
    except (ArithmeticError, MemoryError, ValueError) as error:  # a case that cannot be written
        description += f"\nnot written: {error}"
    finally:
        os.chdir(here)
    (kept / "outcome.txt").write_text(description, errors="backslashreplace")
