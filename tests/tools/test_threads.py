"""How OpenMP's threads wait is set before torch is imported, unless the user has set it."""

import os
import subprocess
import sys

import pytest

PROGRAM = "import os, sys, vitkit.tools.{}; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"


@pytest.mark.parametrize("tool", ["cli", "train", "predict", "start", "data.split"])
@pytest.mark.parametrize("chosen", [None, "ACTIVE"])
def test_threads_wait_passively_unless_the_user_says_otherwise(tool, chosen):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if chosen is None else {"OMP_WAIT_POLICY": chosen}
    command = [sys.executable, "-c", PROGRAM.format(tool)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == [chosen or "PASSIVE", "False"]
