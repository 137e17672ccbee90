"""Whether a peer is provably gone, and nothing that it sent is still to be read here.

peer killed        |-- refuses connections ------------------------------------
what it had sent   |-- in our sockets, unread --|-- read, and written to memory
gone               |-- no ----------------------|-- yes
"""

import array
import contextlib
import errno
import fcntl
import socket
import termios
from pathlib import Path

_CONNECT_S = 1.0
_LISTENING = "0A"
_CLOSE_WAIT = "08"
_TCP = ("tcp", "tcp6")
_OTHERS = {"unix": 6, "netlink": 9, "udp": 9, "udp6": 9, "packet": 8}  # the column of the inode
_NET = Path("/proc/self/net")


def gone(host: str, port: int) -> bool:
    """Whether the process that listened there has provably ended, and nothing of it is left.

    A refusal comes from the kernel of that host: nobody listens. A time-out proves nothing.
    """
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S):
            return False
    except ConnectionRefusedError:
        return not unread()
    except OSError:
        return False


def unread() -> bool:
    """Whether any TCP socket of this process, or one that waits to be accepted by it, holds bytes
    that were not read (proc(5), tcp(7)). What cannot be looked up counts as unread.

    A connection that the peer has reset is in no table of the kernel's any more, and what came
    before the reset can still be read: each socket is asked itself.
    """
    try:
        own = _own()
        rows = [row for name in _TCP for row in _table(name)]
        known = {row[column] for name, column in _OTHERS.items() for row in _table(name)}
    except OSError:
        return True
    listening = {row[9]: row[1].rpartition(":")[2] for row in rows if row[3] == _LISTENING}
    ports = {port for inode, port in listening.items() if inode in own}
    return any(_waits(row, ports) for row in rows) or any(
        _has_bytes(fd) for inode, fd in own.items() if inode not in known and inode not in listening
    )


def _waits(row: list[str], ports: set[str]) -> bool:
    """Whether it is a connection to one of ``ports`` with bytes, that nobody has accepted: it has
    no inode yet. An end that was not read counts as one byte."""
    if row[9] != "0" or row[1].rpartition(":")[2] not in ports:
        return False
    nothing = 1 if row[3] == _CLOSE_WAIT else 0
    return int(row[4].partition(":")[2], 16) > nothing


def _has_bytes(fd: int) -> bool:
    """Here an end is no byte."""
    count = array.array("i", [0])
    try:
        fcntl.ioctl(fd, termios.FIONREAD, count)
    except OSError as error:
        return error.errno != errno.EBADF  # closed since: nobody will read it
    return count[0] > 0


def _own() -> dict[str, int]:
    """Descriptors of this process's sockets, by inode."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            target = str(link.readlink())
            if target.startswith("socket:["):
                found[target[8:-1]] = int(link.name)
    return found


def _table(name: str) -> list[list[str]]:
    """Rows of one of the kernel's tables of sockets; without IPv6 or another protocol there is
    none. ``tcp`` there must be."""
    try:
        lines = (_NET / name).read_text().splitlines()[1:]
    except FileNotFoundError:
        if name == _TCP[0]:
            raise
        return []
    return [line.split() for line in lines]
