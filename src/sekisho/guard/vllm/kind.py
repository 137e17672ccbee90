"""What the guard must know of a connector that moves blocks; `mooncake` and `nixl` say it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from sekisho.guard.seams import Seam

Params = dict[str, Any]
TEXT_MAX = 1024


class InnerError(Exception):
    """The inner connector is missing, unknown, or not as the guard knows it; one line."""


class ParamsError(Exception):
    """``kv_transfer_params`` of a request are not what this connector can go by; one line."""


class Kind(ABC):
    """One kind of connector.

    Attributes:
        prefill_seams: functions of its workers that the guard must lie around at prefill.
        decode_seams: the same at decode.
        addressed_by: the parameters by which decode finds prefill; text.
        reads: decode itself moves the blocks, so that a transfer it says is complete writes no
            more, and one that it never began nothing at all (`Worker.reads`); where prefill
            writes, bytes may still wait in a socket of decode's.
    """

    prefill_seams: ClassVar[tuple[Seam, ...]] = ()
    decode_seams: ClassVar[tuple[Seam, ...]] = ()
    addressed_by: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[bool] = False

    def transfer(self, role: str, params: Params, blocks: int) -> str | None:
        """The hand-off that ``params`` speak of, of a prompt of ``blocks``; None where it has no
        name yet. Raises `ParamsError`."""
        if role == "prefill":
            return self.asked(params)
        for name in self.addressed_by:
            text(params, name)
        return self.fetched(params, blocks)

    @abstractmethod
    def check_options(self, extra: Params) -> None:
        """Raise `InnerError` for an option of its own that the guard does not follow."""

    @abstractmethod
    def check_moved(self, connector: Any, sidecar: str) -> None:
        """Raise `InnerError` where it does not move the side-car with every block."""

    @abstractmethod
    def host_of(self, connector: Any) -> str:
        """Where peers reach this worker."""

    @abstractmethod
    def drain(self, transfer: str) -> bool:
        """At prefill: begin no more writes of ``transfer``; whether none is under way."""

    def holder(self, connector: Any) -> Callable[[str], bool] | None:
        """At prefill, where decode reads: whether a request's blocks were held ever since it was
        computed. None: decode does not read, and has no need to ask."""
        return None

    @abstractmethod
    def asked(self, params: Params) -> str | None:
        """Prefill is asked to compute for a hand-off: the transfer that the caller names, if it
        does. Raises `ParamsError`."""

    @abstractmethod
    def stated(self, name: str, params: Params, given: Params | None) -> str:
        """The transfer of prefill's request ``name``, asked with ``params``; ``given`` is what the
        connector gives to decode."""

    @abstractmethod
    def fetched(self, params: Params, blocks: int) -> str:
        """The transfer that decode is asked to fetch, ``blocks`` for a whole prompt. Raises
        `ParamsError`."""

    def source(self, params: Params) -> str:
        """Name of prefill's request, for `holder`; empty where nobody is to be asked."""
        return ""


def text(params: Params, name: str) -> str:
    """Raises `ParamsError` where it is none."""
    value = params.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= TEXT_MAX:
        raise ParamsError(f"no {name}")
    return value
