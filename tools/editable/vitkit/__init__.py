"""Stands for the package on the path of an editable install, and hands over to it.

The folder that holds this one is what `pip install -e .` puts on the path (setup.py). setuptools' own finder is asked
after the path, where, in the folder that contains the clone, the clone itself is a namespace package named vitkit. A
regular package takes precedence over that one. The clone cannot be on the path: it would offer tools, tests, ... there.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_file = Path(__file__).resolve().parents[3] / "vitkit" / "__init__.py"
_spec = spec_from_file_location(__name__, _file, submodule_search_locations=[str(_file.parent)])
sys.modules[__name__] = module_from_spec(_spec)  # the import that runs this file returns what stands here afterwards
_spec.loader.exec_module(sys.modules[__name__])
