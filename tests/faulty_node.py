"""A node process whose transport breaks its word when a test says so.

    python tests/faulty_node.py CONFIG        with SEKISHO_TEST_FAULTS naming a folder

In that folder the test leaves two kinds of word: a file ``next``, whose text names the `Fault`
that the next submit of any such process suffers, and a file ``release``, upon which all delayed
writes land. Each is gone once it is taken. No command of the product reaches this file.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from sekisho.node.process import main
from sekisho.transport import Completion, Transport
from sekisho.transport.faulty import Fault, FaultPlan, FaultyTransport


class _OnDemand(FaultyTransport):
    """Delays last until the file ``release`` is there."""

    def __init__(self, inner: Transport, folder: Path) -> None:
        super().__init__(inner, _NextSubmit(file=folder / "next"))
        self._release = folder / "release"

    def poll(self) -> list[Completion]:
        if take(self._release) is not None:
            self.release()
        return super().poll()


@dataclass(frozen=True, slots=True)
class _NextSubmit(FaultPlan):
    """The fault that ``file`` names, once."""

    file: Path = Path()

    def pick(self, index: int) -> Fault | None:
        text = take(self.file)
        return None if text is None else Fault(text)


def take(file: Path) -> str | None:
    """The text of a file that is there, which then is not there any more."""
    try:
        text = file.read_text()
        file.unlink()
    except FileNotFoundError:
        return None
    return text


if __name__ == "__main__":
    faults = Path(os.environ["SEKISHO_TEST_FAULTS"])
    sys.exit(main(sys.argv[1:], lambda transport: _OnDemand(transport, faults)))
