"""Which versions of SGLang the guard was seen to work in, and how."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """``how``: what was done with this version, in the words of docs/guard-sglang.md."""

    how: str
    supported: bool


RAN = "ran: `make test-engines`, both roles over Mooncake, on CPU"
READ = "read only: its seams differ or were not run; the server does not start"

VERSIONS: dict[str, Known] = {
    "0.5.13": Known(READ, False),
    "0.5.19": Known(RAN, True),
    "0.5.20": Known(READ, False),
    "0.5.23": Known(RAN, True),
}
