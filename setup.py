"""Find the packages: the folders beside vitkit are installed inside of it, as vitkit.configs, vitkit.tools, ...; the
benchmark runs from a clone only."""

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel


class EditableWheel(editable_wheel):
    """Put tools/editable on the path, whose only package hands over to vitkit; it says why."""

    def finalize_options(self):
        if str(self.mode).lower() != "strict":  # which links every file from a folder of its own
            self.distribution.package_dir = {"": "tools/editable"}
            self.distribution.packages = ["vitkit"]
        super().finalize_options()


packages = find_packages(include=["vitkit", "vitkit.*"])
for folder in ("configs", "model_zoo", "tools"):
    packages += [
        f"vitkit.{name}" for name in find_packages(include=[folder, f"{folder}.*"], exclude=["tools.benchmark"])
    ]
setup(packages=packages, cmdclass={"editable_wheel": EditableWheel})
