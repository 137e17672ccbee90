"""Pages between processes of one machine, through shared memory.

The region is a memfd: it has no name in any file system, so nothing is left behind when its
process is killed, and a peer reaches it through ``/proc/<pid>/fd/<n>`` (same user). It is
sealed against a change of size, so that no copy can end in a bus error. A write to a peer that
has died lands in memory that nobody reads.

This transport never answers UNKNOWN: a copy has happened, or it has not.
"""

import fcntl
import json
import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sekisho.core.page import HEADER_SIZE
from sekisho.transport.base import Completion, PageWrite, Status, TransportError
from sekisho.transport.region import check_memory, check_shape, check_writes, read_endpoint

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(slots=True)
class _Peer:
    region: NDArray[np.uint8]
    page_count: int
    gone: bool = False


class _Job(NamedTuple):
    ticket: int
    peer: _Peer
    pages: tuple[PageWrite, ...]


def _start_time(pid: int) -> int:
    """When process ``pid`` began, in clock ticks since boot (field 22 of /proc/<pid>/stat)."""
    # the command name, in parentheses, may itself hold spaces and parentheses
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _map(fd: int, byte_count: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(fd, byte_count, flags=mmap.MAP_SHARED), np.uint8)


class MemoryTransport:
    """Implements `Transport` with a memfd and one copying thread.

    Args:
        page_bytes: size of a page with its header, bytes.
        page_count: pages in the local region.

    Raises:
        ValueError: a page without payload, or no page.
        TransportError: no memory for the region.
    """

    name = "memory"

    def __init__(self, page_bytes: int, page_count: int) -> None:
        check_shape(page_bytes, page_count)
        self._page_bytes = page_bytes
        self._page_count = page_count
        byte_count = page_bytes * page_count
        check_memory(byte_count)
        self._fd = -1
        try:
            self._fd = os.memfd_create("sekisho-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, byte_count)
            os.posix_fallocate(self._fd, 0, byte_count)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self.region = _map(self._fd, byte_count)
        except OSError as error:
            if self._fd >= 0:
                os.close(self._fd)
            raise TransportError(f"no region of {byte_count} bytes: {error}") from error
        self._peers: dict[int, _Peer] = {}
        self._peer_serial = 0
        self._ticket_serial = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._completions: deque[Completion] = deque()
        self._closed = False
        self._fence = threading.Lock()
        self._worker = threading.Thread(target=self._run, name="sekisho-memory", daemon=True)
        self._worker.start()

    def endpoint(self) -> str:
        """JSON: kind, pid, start time, fd, inode, page_bytes, page_count."""
        self._check_open()
        pid = os.getpid()
        return json.dumps(
            {
                "kind": self.name,
                "pid": pid,
                "start": _start_time(pid),
                "fd": self._fd,
                "inode": os.fstat(self._fd).st_ino,
                "page_bytes": self._page_bytes,
                "page_count": self._page_count,
            }
        )

    def connect(self, endpoint: str) -> int:
        self._check_open()
        numbers = ("pid", "start", "fd", "inode")
        parts = read_endpoint(endpoint, self.name, self._page_bytes, numbers)
        byte_count = self._page_bytes * parts["page_count"]
        fd = -1
        try:
            fd = os.open(f"/proc/{parts['pid']}/fd/{parts['fd']}", os.O_RDWR | os.O_CLOEXEC)
            found = os.fstat(fd)
            # pids, descriptors and inodes are used again: the start time tells a recycled pid,
            # read after the open so that a recycling in between shows too
            if _start_time(parts["pid"]) != parts["start"] or found.st_ino != parts["inode"]:
                raise TransportError(f"process {parts['pid']} is not the one of the endpoint")
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise TransportError("the peer's region is not sealed")
            if found.st_size != byte_count:
                raise TransportError(
                    f"the peer's region has {found.st_size} bytes, its endpoint says {byte_count}"
                )
            region = _map(fd, byte_count)
        except (OSError, ValueError) as error:
            raise TransportError(f"process {parts['pid']} cannot be reached: {error}") from error
        finally:
            if fd >= 0:
                os.close(fd)
        self._peer_serial += 1
        self._peers[self._peer_serial] = _Peer(region, parts["page_count"])
        return self._peer_serial

    def disconnect(self, peer: int) -> None:
        with suppress(KeyError):
            self._peers.pop(peer).gone = True

    def submit(self, peer: int, pages: Sequence[PageWrite]) -> int:
        """As `Transport.submit`.

        Raises:
            ValueError: ``peer`` or a field of ``pages`` is bad; nothing was written.
            TransportError: the transport is closed.
        """
        self._check_open()
        if peer not in self._peers:
            raise ValueError(f"peer {peer} is not connected")
        target = self._peers[peer]
        check_writes(pages, self._page_count, target.page_count)
        self._ticket_serial += 1
        self._jobs.put(_Job(self._ticket_serial, target, tuple(pages)))
        return self._ticket_serial

    def poll(self) -> list[Completion]:
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._completions.popleft())
        return found

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        self._worker.join()
        os.close(self._fd)
        # the mappings go with their last view, so that a view held elsewhere never dangles
        self._peers.clear()
        self.region = np.empty(0, np.uint8)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the transport is closed")

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._copy(job):
                self._completions.append(Completion(job.ticket, Status.DONE, ""))
            else:
                self._completions.append(Completion(job.ticket, Status.FAILED, "disconnected"))
            del job

    def _copy(self, job: _Job) -> bool:
        """Copy page by page; False if the peer was given up, or this end closed, before the end."""
        size = self._page_bytes
        source, target = self.region, job.peer.region
        for write in job.pages:
            if job.peer.gone or self._closed:
                return False
            here, there = write.source_page * size, write.target_page * size
            target[there + HEADER_SIZE : there + size] = source[here + HEADER_SIZE : here + size]
            # release: a lock cycle orders the stores of the payload before those of the header
            # on every architecture (x86 orders stores by itself)
            with self._fence:
                pass
            target[there : there + HEADER_SIZE] = np.frombuffer(write.header, np.uint8)
        return True
