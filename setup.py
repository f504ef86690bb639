"""Find the packages: the folders beside vitkit are installed inside of it, as vitkit.configs, vitkit.tools, ...; the
benchmark runs from a clone only."""

from setuptools import find_packages, setup

packages = find_packages(include=["vitkit", "vitkit.*"])
for folder in ("configs", "model_zoo", "tools"):
    packages += [
        f"vitkit.{name}" for name in find_packages(include=[folder, f"{folder}.*"], exclude=["tools.benchmark"])
    ]
setup(packages=packages)
