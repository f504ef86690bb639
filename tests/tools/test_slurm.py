"""The batch file of vitkit/engine/machines.md, with a scheduler of two machines that are this one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.forked_python import forked_python
from helpers.ports import reserve_port
from helpers.processes import PROCESS_TIMEOUT
from helpers.real_runs import CONFIG, reached

from vitkit.weights import read_checkpoint

pytest.importorskip("vitkit.tools.train", reason="vitkit is not installed (pip install -e .)")
ROOT = Path(__file__).resolve().parents[2]
SRUN = """#!/bin/bash
# Starts the command once per machine, as srun does with one task per machine.
for task in $(seq 0 $((SLURM_NNODES - 1))); do
    SLURM_PROCID=$task SLURM_STEP_ID=0 "$1" --local-addr 127.0.0.1 "${@:2}" &
done
trap 'kill -TERM $(jobs -p); wait' TERM
wait $(jobs -p)
"""
SCONTROL = "#!/bin/bash\nprintf '127.0.0.1\\n127.0.0.2\\n'\n"


def batch_file(port: int) -> str:
    """Return the file that the guide shows, for a tiny model on two machines with one process each."""
    guide = (ROOT / "vitkit/engine/machines.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", guide, re.DOTALL)
    (text,) = (block for block in blocks if "#SBATCH" in block)
    for old, new in {
        "--nproc-per-node 8": "--nproc-per-node 1",
        "29500": str(port),
        "configs/detr_r50.py": "tiny.py",
        "train.images_per_step=64": "train.images_per_step=8 train.accumulate=1 --device cpu",
        "/shared/runs/detr_r50": "run",
    }.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.fixture
def python(tmp_path_factory) -> Iterator[Path]:
    with forked_python(tmp_path_factory.mktemp("python")) as command:
        yield command


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_a_job_of_two_machines_continues_when_it_is_requeued(tmp_path, monkeypatch, python):
    monkeypatch.chdir(tmp_path)
    # The first time, it waits until it is requeued.
    hold = "import os\n\nif 'SLURM_RESTART_COUNT' not in os.environ:\n    from helpers.real_runs import hold_after\n\n"
    Path("tiny.py").write_text(f"{hold}    hold_after(5)\n{CONFIG}")
    for name, text in {
        "srun": SRUN,
        "scontrol": SCONTROL,
        "torchrun": f'#!/bin/bash\nexec {python} -m torch.distributed.run "$@"\n',
    }.items():
        Path("bin").mkdir(exist_ok=True)
        Path("bin", name).write_text(text)
        Path("bin", name).chmod(0o755)

    def start(restarts: int) -> subprocess.Popen:
        Path("train.sbatch").write_text(batch_file(reserve_port()))
        slurm = dict(SLURM_NNODES="2", SLURM_NTASKS="2", SLURM_JOB_ID="17", SLURM_JOB_NODELIST="node[1-2]")
        slurm |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        slurm |= {"PYTHON_EXEC": str(python)}  # torchrun starts ranks with it
        search = {"PATH": f"{Path.cwd() / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{Path.cwd()}"}
        with open("output.txt", "a") as output:
            return subprocess.Popen(
                ["bash", "train.sbatch"],
                env={**os.environ, **slurm, **search, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    job = start(0)
    deadline = time.monotonic() + PROCESS_TIMEOUT
    while reached("run") < 5 and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(job.pid, signal.SIGTERM)  # as scontrol requeue does
    while Path("run", ".lock").exists() and time.monotonic() < deadline:  # the processes outlive the script
        time.sleep(0.1)
    step = read_checkpoint("run/last.pth")["progress"]["step"]
    assert step == 6, Path("output.txt").read_text()[-3000:]
    assert start(1).wait(PROCESS_TIMEOUT) == 0, Path("output.txt").read_text()[-3000:]
    progress = read_checkpoint("run/last.pth")["progress"]
    assert (progress["epoch"], progress["step"]) == (3, 12)
    starts = json.loads(Path("run", "run.json").read_text())["starts"]
    assert [entry["device"]["processes"] for entry in starts] == [2, 2]
