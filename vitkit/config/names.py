"""Find the config that a name stands for: a file, a member of a family, or a family with arguments.

A family is a file whose `config` takes arguments, with a table `VARIANTS`: name -> (arguments, what is published).
"""

import functools
import importlib
import importlib.util
import re
from collections.abc import Mapping
from os.path import exists, isfile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vitkit.config.overrides import parse_arguments
from vitkit.errors import ConfigError
from vitkit.registry import nearest

CONFIG_SUFFIXES = (".py", ".json")
_WITH_ARGUMENTS = re.compile(r"(?P<family>[^:=]*[^:=/\\]):(?P<arguments>[A-Za-z_]\w*=.*)", re.DOTALL)


class ConfigSource(NamedTuple):
    """The file and the arguments that give a config."""

    name: str
    """Names the run's folder: "detr_r50", "dfine_s_coco", "mask2former_swin_tiny_ade20k"."""
    file: Path
    arguments: Mapping[str, Any] = MappingProxyType({})
    """Arguments of the file's `config`."""
    published: str = ""
    """The figures in the family's table."""


def find_config(text: str | Path) -> ConfigSource | None:
    """Find a config; None if there is none of that name.

    Args:
        text: a file that ends in .py or .json; an installed name, such as "detr_r50", "quickstart/detr" or
            "dfine_s_coco", which may also be written as a path, "configs/dfine_s_coco.py"; or one of these with
            arguments of its `config`, "mask2former:backbone=swin_tiny,data=ade20k".
    Raises:
        ConfigError: the arguments do not parse, or there is no such family to take them.
    """
    if _is_config_file(text):
        return ConfigSource(Path(text).stem, Path(text))
    if str(text).startswith("."):  # "./NAME" is a path, as opposed to an installed name
        return None
    if has_arguments(text):
        return _with_arguments(*_WITH_ARGUMENTS.fullmatch(str(text)).groups())
    if file := _find_installed_file(Path(text)):
        return ConfigSource(file.stem, file)
    return _variants().get(_strip_installed_name(Path(text)))


def has_arguments(text: str | Path) -> bool:
    """Whether a text is a config with arguments, rather than a file or a name."""
    return _WITH_ARGUMENTS.fullmatch(str(text)) is not None and not _is_config_file(text)


def is_installed_name(text: str | Path) -> bool:
    """Whether a text is the name of an installed config, which nothing in the working directory replaces: a file or a
    folder of that name is written as a path, "./NAME"."""
    path = Path(text)
    if not isinstance(text, str) or path.as_posix() != text or path.suffix in CONFIG_SUFFIXES:
        return False
    return _find_installed_file(path) is not None or _strip_installed_name(path) in _variants()


def check_unambiguous(text: str | Path) -> None:
    """Check that the working directory has nothing by the name of an installed config, for names that may be either.

    Raises:
        ConfigError: it has.
    """
    if is_installed_name(text) and exists(text):
        raise ConfigError(
            f"{text!r} is the name of an installed config, and there is also '{text}' in this folder: rename it, or "
            f"write it as a path, ./{text}."
        )


def _is_config_file(text: str | Path) -> bool:
    """Whether a text is the path of a file that is read as a config; any other file is data, which is not run."""
    return Path(text).suffix in CONFIG_SUFFIXES and isfile(text)  # Path.is_file raises for a name that is too long


def config_names() -> list[str]:
    """Return the names of the installed configs, such as "detr_r50", "dfine_s_coco" and "quickstart/detr"."""
    files = (
        file.relative_to(folder).with_suffix("").as_posix()
        for folder in list_installed_folders()
        for file in folder.rglob("*.py")
        # Parts of configs, ablations and the code of examples are beside the configs; a family's members have names.
        if "\ndef config(" in (text := file.read_text(encoding="utf-8")) and not _is_family(text)
    )
    return sorted({*files, *_variants()})


def family_names() -> list[str]:
    """Return the names of the families, such as "mask2former" and "pretrain/mae"."""
    files = {source.file for source in _variants().values()}
    return sorted(
        file.relative_to(folder).with_suffix("").as_posix()
        for folder in list_installed_folders()
        for file in files
        if file.is_relative_to(folder)
    )


def list_installed_folders() -> list[Path]:
    """Return the folders of `vitkit.configs`; none if only the package of the library is installed."""
    package = importlib.util.find_spec("vitkit.configs")
    return [Path(folder) for folder in (package.submodule_search_locations or [] if package else [])]


def _with_arguments(family: str, arguments: str) -> ConfigSource | None:
    source = find_config(family)
    if source is None or source.file.suffix == ".json":
        if Path(family).suffix in CONFIG_SUFFIXES or "/" in family:
            return None
        raise ConfigError(f"no config {family!r} that takes arguments. {nearest(family, family_names())}")
    values = parse_arguments(arguments)
    # The name of a run's folder has letters, digits and what stands in numbers.
    parts = (re.sub(r"[^\w.-]+", "-", str(value)) for value in values.values())
    return ConfigSource("_".join([source.name, *parts]), source.file, {**source.arguments, **values})


def _strip_installed_name(path: Path) -> str:
    """Return the name in a path, without "configs/" before it and ".py" after it."""
    name = path.as_posix().removeprefix("configs/")
    return name.removesuffix(".py") if path.parts[:1] == ("configs",) else name


def _find_installed_file(path: Path) -> Path | None:
    """Return the file of an installed config; a path below "configs/" may also name one, a longer path does not."""
    if path.is_absolute() or (path.suffix in CONFIG_SUFFIXES and path.parts[:1] != ("configs",)):
        return None
    name = f"{_strip_installed_name(path)}.py"
    return next((file for folder in list_installed_folders() if isfile(file := folder / name)), None)


@functools.cache
def _variants() -> dict[str, ConfigSource]:
    """Return the members of all installed families by name."""
    return {
        name: ConfigSource(name, file, arguments, published)
        for folder in list_installed_folders()
        for file in sorted(folder.rglob("*.py"))
        if _is_family(file.read_text(encoding="utf-8"))
        for name, (arguments, published) in importlib.import_module(_module_name(file, folder)).VARIANTS.items()
    }


def _module_name(file: Path, folder: Path) -> str:
    return ".".join(("vitkit.configs", *file.relative_to(folder).with_suffix("").parts))


def _is_family(text: str) -> bool:
    return "\nVARIANTS = {" in text
