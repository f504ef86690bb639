"""A command that runs programs as `python` does, within a moment: its processes are forks that have imported torch.

The command itself is a small client. It sends its arguments, environment and open files to a server in the process of
the tests, which has the program run in a fork, and ends as the fork ends. Signals reach the fork, and a client that is
killed takes its fork with it, so that torchrun, or a shell script, may treat it as the process of the program.
"""

import json
import os
import runpy
import signal
import socket
import stat
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.reduction import DupFd
from pathlib import Path

import torch
from helpers.processes import PROCESSES

from vitkit.engine import run_folder

CLIENT = """
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ), os.getppid()]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
status = int(server.recv(8))
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextmanager
def forked_python(folder: Path) -> Iterator[Path]:
    """Yield an executable file that takes `python`'s arguments: a program and its arguments, or -m and a module.

    Args:
        folder: an empty folder. As the path of a socket, it should be short.
    """
    address = folder / "socket"
    (folder / "client.py").write_text(CLIENT)
    command = folder / "python"
    # Without `site`, Python starts within 20 ms.
    command.write_text(f"#!/bin/sh\nexec '{sys.executable}' -ISE '{folder / 'client.py'}' '{address}' \"$@\"\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        server.listen(16)
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        try:
            yield command
        finally:
            server.shutdown(socket.SHUT_RDWR)


def _accept(server: socket.socket) -> None:
    with suppress(OSError):  # the server is closed
        while True:
            threading.Thread(target=_serve, args=(server.accept()[0],), daemon=True).start()


def _serve(client: socket.socket) -> None:
    with client:
        head, files, *_ = socket.recv_fds(client, 8, 3)
        size, request = int.from_bytes(head, "big"), b""
        while len(request) < size and (part := client.recv(size - len(request))):
            request += part
        if not size or len(request) < size:  # the client was killed
            return
        process = PROCESSES.Process(target=_run, args=(*json.loads(request), [_OpenFile(file) for file in files]))
        process.start()
        for file in files:
            os.close(file)
        while process.sentinel not in wait([process.sentinel, client]):
            number = client.recv(1)
            with suppress(ProcessLookupError):  # it has ended in between
                os.kill(process.pid, number[0] if number else signal.SIGKILL)
            if not number:
                break
        process.join()
        with suppress(OSError):  # the client was killed
            client.sendall(str(process.exitcode).encode())


class _OpenFile:
    """An open file of this process that is given to a new one."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple:
        return _detach, (DupFd(self.number),)


def _detach(file) -> int:
    return file.detach()


def _run(argv: list[str], folder: str, environment: dict[str, str], parent: int, files: list[int]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has it read os.devnull
    # By these, a restarted process finds the run that an earlier one of its parent's began.
    os.getppid = lambda: parent
    run_folder._THIS_PROCESS = f"process {os.getpid()}"
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    argv = [argument for argument in argv if argument != "-u"]
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path.insert(0, folder)
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).parent))
            runpy.run_path(argv[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
