"""Lets a user's file import the files beside it, for as long as it is loaded, whatever the working directory is."""

import importlib.abc
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path


@contextmanager
def importable(folder: Path, admit: Callable[[Path, bytes], None]) -> Iterator[None]:
    """Let `import name` find `name.py`, or a package `name`, in a folder.

    Installed modules come first, so that a file called torch.py does not replace torch; a name that also stands for a
    module that is not installed is an error. The modules are forgotten afterwards, so that those of two folders do not
    mix.

    Args:
        admit: called with a file and its content before it runs; may raise an error to refuse it.
    """
    folder = folder.resolve()
    finder = _Finder(folder, admit)
    beside = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    # Modules of the same names that were imported from elsewhere, such as by the program that loads the file.
    hidden = {
        name: module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in beside
        and not finder.is_inside(getattr(module, "__file__", None) or "")
        and not _is_installed(name, getattr(module, "__file__", None))
    }
    for name in hidden:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.loaded:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, folder: Path, admit: Callable[[Path, bytes], None]):
        self.folder, self.admit = folder, admit
        self.loaded: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a file of the folder, or None for the other finders to look for the module."""
        parent, _, name = fullname.rpartition(".")
        if parent and parent not in self.loaded:
            return None
        base = self.folder.joinpath(*fullname.split("."))
        files = (base.with_name(f"{name}.py"), base / "__init__.py")
        file = next((file for file in files if file.is_file()), None)
        if file is None and not base.is_dir():
            return None
        if not parent and (other := self._origin_elsewhere(fullname)) is not None:
            if _is_installed(fullname, other):
                return None
            raise ImportError(f"{fullname!r} is both {file or base} and {other}: rename the first one")
        # A package gets no search locations, so that only this finder looks for its modules.
        spec = ModuleSpec(fullname, self, origin=None if file is None else str(file), is_package=file != files[0])
        spec.has_location = file is not None
        return spec

    def _origin_elsewhere(self, name: str) -> str | None:
        """Return what the other finders find under a name outside of the folder."""
        for finder in sys.meta_path:
            spec = None if isinstance(finder, _Finder) else finder.find_spec(name, None)
            if spec is not None and spec.origin and not self.is_inside(spec.origin):
                return spec.origin
        return None

    def is_inside(self, file: str) -> bool:
        """Return whether a file is in the folder."""
        return Path(file).resolve().is_relative_to(self.folder)

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system create the module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the file, if it is admitted; a folder without `__init__.py` has none."""
        self.loaded.append(module.__name__)
        if module.__spec__.origin is None:
            return
        file = Path(module.__spec__.origin)
        source = file.read_bytes()
        self.admit(file, source)
        exec(compile(source, str(file), "exec"), module.__dict__)


def _is_installed(name: str, file: str | None) -> bool:
    """Return whether a module belongs to Python or to an installed package, or is vitkit or the program."""
    top = name.partition(".")[0]
    if file is None or top in sys.stdlib_module_names or top in ("vitkit", "__main__"):
        return True
    return any(Path(file).is_relative_to(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib"))
