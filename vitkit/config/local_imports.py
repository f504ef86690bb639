"""Lets a user's file import the files beside it, for as long as it is loaded, whatever the working directory is."""

import importlib.abc
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


@contextmanager
def importable(folder: Path, admit: Callable[[Path, bytes], None], *, keep: bool = False) -> Iterator[None]:
    """Let `import name` find `name.py`, or a package `name`, in a folder.

    Installed modules come first, so that a file called torch.py does not replace torch; a name that also stands for a
    module that is not installed is an error. Files are compiled from the content that was admitted, never taken from a
    `__pycache__` beside them.

    Args:
        admit: called with a file and its content before it runs; may raise an error to refuse it.
        keep: whether the modules stay imported, and import others of their packages in the same way later. Otherwise
            they are forgotten afterwards, so that those of two folders do not mix.
    """
    folder = folder.resolve()
    finder = _Finder(folder, admit, keep=keep)
    beside = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    # Modules of the same names that were imported from elsewhere, such as by the program that loads the file.
    hidden = {
        name: module
        for name, module in list(sys.modules.items() if beside & sys.modules.keys() else ())
        if name.partition(".")[0] in beside
        and not finder.is_inside((file := getattr(module, "__file__", None)) or "")
        and not is_installed(name, file)
    }
    for name in hidden:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    is_loaded = False
    try:
        yield
        is_loaded = True
    finally:
        if keep and is_loaded:
            finder.packages = {name.partition(".")[0] for name in finder.loaded}
        else:
            sys.meta_path.remove(finder)
            for name in finder.loaded:
                sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in hidden.items() if name not in sys.modules})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    packages: set[str] | None = None
    """Once the folder is loaded, the modules of it that are kept; None: any may be imported."""

    def __init__(self, folder: Path, admit: Callable[[Path, bytes], None], *, keep: bool):
        self.folder, self.admit, self.keep = folder, admit, keep
        self.loaded: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a file of the folder, or None for the other finders to look for the module."""
        parent, _, name = fullname.rpartition(".")
        if parent and parent not in self.loaded:
            return None
        if self.packages is not None and fullname.partition(".")[0] not in self.packages:
            return None
        base = self.folder.joinpath(*fullname.split("."))
        files = (base.with_name(f"{name}.py"), base / "__init__.py")
        file = next((file for file in files if file.is_file()), None)
        if file is None and not base.is_dir():
            return self._find_compiled(fullname, base.parent) if parent else None
        if not parent and (other := self._origin_elsewhere(fullname)) is not None:
            if is_installed(fullname, other):
                return None
            raise ImportError(f"{fullname!r} is both {file or base} and {other}: rename the first one")
        spec = ModuleSpec(fullname, self, origin=None if file is None else str(file), is_package=file != files[0])
        # A package that is not kept gets no search locations, so that only this finder looks for its modules.
        if self.keep and spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(str(base))
        spec.has_location = file is not None
        return spec

    def _find_compiled(self, fullname: str, folder: Path) -> ModuleSpec | None:
        """Return the spec of an extension module of a package, after it is admitted."""
        spec = PathFinder.find_spec(fullname, [str(folder)])
        if spec is not None and spec.origin:
            self.admit(Path(spec.origin), Path(spec.origin).read_bytes())
            self.loaded.append(fullname)
        return spec

    def _origin_elsewhere(self, name: str) -> str | None:
        """Return the origin of a module that the other finders find outside of the folder."""
        for finder in sys.meta_path:
            spec = None if isinstance(finder, _Finder) else finder.find_spec(name, None)
            if spec is not None and spec.origin and not self.is_inside(spec.origin):
                return spec.origin
        return None

    def is_inside(self, file: str) -> bool:
        """Return whether a file is in the folder."""
        return Path(file).resolve().is_relative_to(self.folder)

    def get_data(self, path: str | Path) -> bytes:
        """Return the content of a file, as the loaders of Python do."""
        return Path(path).read_bytes()

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system create the module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the file, if it is admitted; a folder without `__init__.py` has none."""
        self.loaded.append(module.__name__)
        if module.__spec__.origin is None:
            return
        file = Path(module.__spec__.origin)
        source = self.get_data(file)
        self.admit(file, source)
        exec(compile(source, str(file), "exec"), module.__dict__)


def find_specs(name: str) -> list[ModuleSpec]:
    """Return the specs of a module and, before it, of the packages that contain it, without importing any; empty if
    there is no such module."""
    specs: list[ModuleSpec] = []
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = specs[-1].submodule_search_locations if specs else None
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec") and (path or end == 1))
        spec = next(filter(None, (finder.find_spec(".".join(parts[:end]), path) for finder in finders)), None)
        if spec is None:
            return []
        specs.append(spec)
    return specs


def folder_of(name: str) -> Path | None:
    """Return the folder that `import` finds a module in; None for an installed one, and where there is no file."""
    specs = find_specs(name)
    if not specs or not specs[-1].has_location or is_installed(name, specs[-1].origin):
        return None
    is_package = specs[-1].submodule_search_locations is not None
    return Path(specs[-1].origin).resolve().parents[len(specs) - 1 + is_package]


def is_installed(name: str, file: str | None) -> bool:
    """Return whether a module belongs to Python or to an installed package, or is vitkit or the program."""
    top = name.partition(".")[0]
    if file is None or top in sys.stdlib_module_names or top in ("vitkit", "__main__"):
        return True
    # By their names, as an environment may see the packages of the system, of the user and of another environment.
    folders = {"site-packages", "dist-packages"}
    return not folders.isdisjoint(Path(file).parts) or Path(file).is_relative_to(sysconfig.get_path("stdlib"))
