"""A run on two machines of which one is cut off: network namespaces, joined by a cable of which an end is put down."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.elastic_runs import agent, lose, num_ranks, wait_for_ranks
from helpers.real_runs import CONFIG, finish, losses_of, start, wait_for_step

from vitkit.apps.training.process_group import SECONDS_UNTIL_LOST

OPTIONS = [
    "tiny.py",
    "train.accumulate=1",
    "train.images_per_step=8",
    "data.images_per_gpu=2",
    "schedule.type=ConstantLR",
]
OPTIONS += ["optimizer.lr=1e-5", "train.eval_every=1000"]
ADDRESSES = ("10.99.0.1", "10.99.0.2")


class Machine:
    """A network namespace, which ends with the process that holds it."""

    def __init__(self) -> None:
        self.holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo there; exec sleep 3600"], stdout=subprocess.PIPE
        )
        self.holder.stdout.readline()
        self.inside = ["nsenter", "--target", str(self.holder.pid), "--net"]

    def ip(self, *arguments: str) -> None:
        subprocess.run([*self.inside, "ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Two machines with a cable between them."""
    two = []
    try:
        try:
            two = [Machine(), Machine()]
            other_end = ["netns", str(two[1].holder.pid)]
            two[0].ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", *other_end)
            for machine, address in zip(two, ADDRESSES):
                machine.ip("addr", "add", f"{address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    machine.ip("link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield two
    finally:
        for machine in two:
            machine.holder.kill()
            machine.holder.wait()


def end(agents: list[subprocess.Popen]) -> None:
    """End the agents that run as a batch system does."""
    running = [process for process in agents if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGTERM)
    for process in running:
        process.wait(timeout=120)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs network namespaces")
def test_a_machine_is_cut_off_and_comes_back(machines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(CONFIG)
    agents = []

    def join(number: int, *argv: str) -> None:
        agents.append(
            agent(
                f"{ADDRESSES[0]}:29500",
                *argv,
                address=ADDRESSES[number],
                is_host=number == 0,
                inside=machines[number].inside,
                variables={"GLOO_SOCKET_IFNAME": "eth0"},
            )
        )

    new = [*OPTIONS, "train.epochs=100000", "--run-dir", "run"]
    try:
        join(0, *new)
        join(1, *new)
        wait_for_ranks("run", 2, agents, seconds=300)
        wait_for_step("run", 10, [])
        machines[1].ip("link", "set", "eth0", "down")
        began = time.monotonic()
        wait_for_ranks("run", 1, agents[:1], seconds=300)
        seconds = time.monotonic() - began
        machines[1].ip("link", "set", "eth0", "up")
        # The agent that was cut off ends; if that is after it sees the network again, it has joined before or closes
        # the rendezvous for everybody, so that the other one goes on alone until the job is started again.
        while agents[1].poll() is None and num_ranks("run") == 1 and time.monotonic() - began < 400:
            time.sleep(1)
        assert agents[0].poll() is None and (agents[1].poll() is not None or num_ranks("run") == 2)
        end(agents)
        join(0, "--resume", "run")
        join(1, "--resume", "run")
        wait_for_ranks("run", 2, agents[2:], seconds=300)
        end(agents)
    finally:
        for process in agents:
            if process.poll() is None:
                lose(process)
    print(f"continues on one machine {seconds:.0f} s after the other is cut off")
    assert seconds < SECONDS_UNTIL_LOST + 120
    main, cut_off = (path.read_text() for path in sorted(Path().glob("agent*.txt"))[:2])
    assert main.count("rank 1 (") == 1 and "does not answer (Connection timed out): it or the network is lost." in main
    assert cut_off.count(f"error (rank 1): the machine of rank 0 ({ADDRESSES[0]}) does not answer") == 1

    steps = [*losses_of("run")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 40  # none is lost, or there twice
    epochs = len(steps) // 4 + 2
    assert finish(start("--resume", "run", f"train.epochs={epochs}")) == [0]
    assert [*losses_of("run")] == list(range(1, 4 * epochs + 1))
    assert finish(start(*OPTIONS, "train.epochs=10", "--run-dir", "one")) == [0]
    same = {step: losses_of("run")[step] for step in range(1, 41)}
    assert same == pytest.approx(losses_of("one"), rel=1e-4)
