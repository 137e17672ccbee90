"""Which versions of vLLM and which of its connectors the guard was seen to work in, and how."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """``how``: what was done with it, in the words of docs/guard-vllm.md."""

    how: str
    supported: bool


RAN = "ran: `make test-engines`, both roles over Mooncake, on CPU"
NOT_RUN = "not run"
NIXL_RAN = (
    "ran, on CPU: the whole table holds; a second prompt of the whole pool ended in 500, "
    "cause unknown"
)
OFFLOADS = "its sources were read: as `kv_both`, without prefill; it cannot carry the headers"
NO_SALT = "its sources were read: its files are named by tokens alone, so that tenants share them"

VERSIONS: dict[str, Known] = {
    "0.32.0": Known(RAN, True),
}

CONNECTORS: dict[str, Known] = {
    "MooncakeConnector": Known(RAN, True),
    "NixlConnector": Known(NIXL_RAN, False),
    "LMCacheConnectorV1": Known(NOT_RUN, False),
    "OffloadingConnector": Known(OFFLOADS, False),
    "ExampleConnector": Known(NO_SALT, False),
    "MultiConnector": Known(NOT_RUN, False),
}


def supported(table: dict[str, Known]) -> str:
    """The names that may start, for a message."""
    return ", ".join(name for name, known in table.items() if known.supported)
