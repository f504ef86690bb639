"""A folder in which someone runs a command may have come from anyone: its files change nothing unasked."""

import os
import stat
import subprocess
import sys

PROGRAM = """
import vitkit.tools.predict
from matplotlib.figure import Figure

figure = Figure()
figure.subplots().set_title("title")
figure.savefig("figure.png")
"""


def test_settings_of_matplotlib_in_the_folder_run_no_program(tmp_path):
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nbackend: module://evil\n")
    (tmp_path / "evil.py").write_text("raise SystemExit('evil.py was run')\n")
    (tmp_path / "latex").write_text("#!/bin/sh\ntouch ran\n")
    (tmp_path / "latex").chmod(stat.S_IRWXU)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-c", PROGRAM]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "figure.png").is_file() and not list(tmp_path.rglob("ran"))
