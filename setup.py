"""Find the packages, and describe them by the README.

The folders beside vitkit are installed inside of it, as vitkit.configs, vitkit.tools, ...; the benchmark runs from a
clone only.
"""

import configparser
import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel


class EditableWheel(editable_wheel):
    """Put tools/editable on the path, whose only package hands over to vitkit; it says why."""

    def finalize_options(self):
        if str(self.mode).lower() != "strict":  # which links every file from a folder of its own
            self.distribution.package_dir = {"": "tools/editable"}
            self.distribution.packages = ["vitkit"]
        super().finalize_options()


def describe(readme: str, address: str | None) -> str:
    """Return the README as a page that lies elsewhere, as that of a package does.

    Args:
        readme: Markdown with links relative to the repository.
        address: the repository on GitHub. Without it, links to its files become text, and its images are left out.
    """
    link, image = r"\[([^\]]*)\]\((?!\w+:)([^)\s]+)\)", r"!\[([^\]]*)\]\((?!\w+:)([^)\s]+)\)"
    if address is None:
        return re.sub(link, r"\1", re.sub(image + r"\n*", "", readme))
    raw = address.replace("https://github.com/", "https://raw.githubusercontent.com/")
    return re.sub(link, rf"[\1]({address}/blob/main/\2)", re.sub(image, rf"![\1]({raw}/main/\2)", readme))


folder = Path(__file__).parent
settings = configparser.ConfigParser(interpolation=None)
settings.read(folder / "setup.cfg", encoding="utf-8")
url = settings["metadata"].get("url")
described = describe((folder / "README.md").read_text(encoding="utf-8"), url)
links = {"Changelog": f"{url}/blob/main/CHANGELOG.md", "Issues": f"{url}/issues"} if url else {}
packages = find_packages(include=["vitkit", "vitkit.*"])
for folder in ("configs", "model_zoo", "tools"):
    packages += [
        f"vitkit.{name}" for name in find_packages(include=[folder, f"{folder}.*"], exclude=["tools.benchmark"])
    ]
setup(packages=packages, long_description=described, project_urls=links, cmdclass={"editable_wheel": EditableWheel})
