"""Which versions of vLLM and which of its connectors the guard was seen to work in, and how."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """``how``: what was done with it, in the words of docs/guard-vllm.md."""

    how: str
    supported: bool


RAN = "ran: `make test-engines`, both roles over Mooncake, on CPU"
NOT_RUN = "not run; the engine does not start"

VERSIONS: dict[str, Known] = {
    "0.32.0": Known(RAN, True),
}

CONNECTORS: dict[str, Known] = {
    "MooncakeConnector": Known(RAN, True),
    "NixlConnector": Known(NOT_RUN, False),
    "LMCacheConnectorV1": Known(NOT_RUN, False),
    "OffloadingConnector": Known(NOT_RUN, False),
    "MultiConnector": Known(NOT_RUN, False),
}


def supported(table: dict[str, Known]) -> str:
    """The names that may start, for a message."""
    return ", ".join(name for name, known in table.items() if known.supported)
