"""Ports of this machine, for programs that are started later and listen there."""

import socket

_HELD: list[socket.socket] = []
"""Sockets on the ports, which keep the system from giving these to any other process that asks for a free one."""


def reserve_port() -> int:
    """Return a free port, which stays reserved until this process ends."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch's store listens there with the same option
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return held.getsockname()[1]
