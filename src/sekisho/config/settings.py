"""What can be configured, with the limits that its checks, the flags' help and the errors state."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

DEMO_MODEL = "demo"
DEMO_NAME = "SmolLM2-135M-Instruct"
_NODES_MAX = 64
REPEATABLE = ("sglang_prefill", "sglang_decode", "vllm_prefill", "vllm_decode")
"""Settings that hold several values: their flags may be given more than once."""
# No credentials, path, query or fragment: those would be shown, or are none of an engine's.
_SERVER = re.compile(r"(https?://[^\s/@?#,\\]+?(?::\d{1,5})?)/?(?:@(\d{1,5}))?", re.ASCII)


# What an engine that runs elsewhere has settings of its own for.
_OF_OUR_NODES = (
    *("dtype", "device", "isolation", "colocated", "prefill", "decode", "transport"),
    *("mooncake_protocol", "page_size", "pool_tokens", "max_batch", "chunk_tokens", "queue_max"),
    "threads",
)

_OF_ENGINES = {
    "sglang": ("sglang_prefill", "sglang_decode", "sglang_key_file"),
    "vllm": ("vllm_prefill", "vllm_decode", "vllm_key_file", "local"),
}


class Resolved(NamedTuple):
    """A setting's value, fit to be shown, and the place that gave it."""

    value: str | int
    source: str


def _whole(meaning: str, low: int, high: int, default: int) -> Any:
    """A whole-number field; its limit is stated once, for the check and for the message."""
    return Field(default, ge=low, le=high, description=f"{meaning}, {low} to {high}")


class Settings(BaseModel):
    """Everything that can be configured. Each description states the limit, once for the CLI's
    help and for the error messages.

    Sizes: ``page_size``, ``pool_tokens``, ``window`` and ``chunk_tokens`` are in tokens;
    ``max_batch`` in rows; ``queue_max`` in requests.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(DEMO_MODEL, description="a Hugging Face folder, or demo for the demo model")
    served_model_name: str = Field(
        default_factory=lambda data: _name_of(data["model"]),
        description="the model's name in the API; by default the folder's name",
    )
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="bfloat16 or float32")
    device: Literal["cpu", "cuda"] = Field("cpu", description="cpu or cuda")
    isolation: Literal["strict", "standard", "off"] = Field(
        "standard",
        description="strict, standard or off (off is for measuring: the node is never ready)",
    )
    colocated: int = _whole("the number of nodes that prefill and decode", 0, _NODES_MAX, 0)
    prefill: int = Field(
        default_factory=lambda data: 0 if data["colocated"] else 1,
        ge=0,
        le=_NODES_MAX,
        description=f"the number of prefill nodes, 0 to {_NODES_MAX}",
    )
    decode: int = Field(
        default_factory=lambda data: 0 if data["colocated"] else 1,
        ge=0,
        le=_NODES_MAX,
        description=f"the number of decode nodes, 0 to {_NODES_MAX}",
    )
    transport: Literal["auto", "mooncake", "memory"] = Field(
        "auto", description="auto (mooncake where its libraries are), mooncake or memory"
    )
    mooncake_protocol: Literal["tcp", "rdma"] = Field("tcp", description="tcp or rdma")
    mooncake_device: str = Field("", description="the RDMA device; empty: Mooncake chooses")
    engine: Literal["sekisho", "sglang", "vllm"] = Field(
        "sekisho",
        description="sekisho (nodes of our own, started here), sglang or vllm (running servers)",
    )
    sglang_prefill: str = Field(
        "",
        description="SGLang prefill servers, each once, as http://host:port[@BOOTSTRAP_PORT], "
        "with commas or by repeating the flag",
    )
    sglang_decode: str = Field(
        "",
        description="SGLang decode servers, each once, as http://host:port, with commas or by "
        "repeating the flag",
    )
    sglang_key_file: str = Field("", description="the file of those servers' API key, if any")
    vllm_prefill: str = Field(
        "",
        description="vLLM prefill servers, each once, as http://host:port@BOOTSTRAP_PORT, with "
        "commas or by repeating the flag",
    )
    vllm_decode: str = Field(
        "",
        description="vLLM decode servers, each once, as http://host:port, with commas or by "
        "repeating the flag",
    )
    vllm_key_file: str = Field("", description="the file of those servers' API key, if any")
    local: bool = Field(
        False, description="true or false: start the vLLM pair here, on this machine's CPU"
    )
    host: str = Field("127.0.0.1", description="the address the gateway binds")
    port: int = _whole("the TCP port of the gateway (0: any free one)", 0, 65535, 8000)
    page_size: int = Field(
        16,
        ge=16,
        le=1024,
        multiple_of=16,
        description="tokens in a page, a multiple of 16 from 16 to 1024",
    )
    pool_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="tokens that a node's pool holds, at least one page, or auto (free memory)",
    )
    window: Annotated[int, Field(ge=2)] | Literal["auto"] = Field(
        "auto",
        description="tokens of prompt and answer that every node must hold, at least 2, or auto "
        "(what the smallest node holds)",
    )
    max_batch: int = _whole("the most requests a decode node runs at once", 1, 1024, 32)
    chunk_tokens: int = _whole("the most tokens prefilled in one pass", 1, 65536, 256)
    queue_max: int = _whole("the most requests waiting for a decode node", 0, 65536, 256)
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto", description="compute threads of a node, 1 to 1024, or auto"
    )
    state_dir: Path = Field(description="the folder of keys and database")
    database: str = Field(
        default_factory=lambda data: f"sqlite:///{data['state_dir']}/sekisho.db",
        pattern=r"^[a-z][a-z0-9+_]*://",
        description="a database URL such as postgresql+psycopg://user:password@host/name",
        repr=False,
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="debug, info, warning or error"
    )

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("*", mode="before")
    @classmethod
    def _no_lenient_values(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic would take true or 1.0 for 1; and "" for a path is the current folder."""
        name = info.field_name
        may_be_empty = name in ("mooncake_device", "sglang_key_file", "vllm_key_file", *REPEATABLE)
        number = isinstance(value, bool | float) and name != "local"
        if number or (value == "" and not may_be_empty):
            raise ValueError("not a value of this setting")
        return value

    @field_validator(*REPEATABLE, mode="before")
    @classmethod
    def _servers(cls, value: object, info: ValidationInfo) -> object:
        """A list of a file or of repeated flags, or text with commas; checked, and kept as text."""
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            value = ",".join(value)
        if isinstance(value, str):
            servers = parse_servers(value)
            name = info.field_name or ""
            if name.endswith("_decode") and any(port for _, port in servers):
                raise ValueError("a decode server has no bootstrap port")
            if name == "vllm_prefill" and not all(port for _, port in servers):
                raise ValueError("vLLM does not state the bootstrap port: it must be named")
        return value

    @field_validator("state_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for wrong, message in self._disagreements():
            if wrong:
                raise ValueError(message)
        return self

    def _disagreements(self) -> tuple[tuple[bool, str], ...]:
        """Rules over more than one setting: (broken, what to change)."""
        split = f"prefill = {self.prefill} and decode = {self.decode}"
        together = self.colocated > 0
        moves = self.transport != "auto" or self.mooncake_protocol != "tcp"
        foreign = self.engine != "sekisho"
        unused = [name for name in _OF_OUR_NODES if self._is_changed(name)] if foreign else []
        named = {name: self._servers_of(name) for name in _OF_ENGINES}
        return (
            (
                foreign and not self.local and not all(named.get(self.engine, ())),
                f'engine = "{self.engine}" needs {self.engine}_prefill and {self.engine}_decode, '
                "a server each",
            ),
            (
                self.local and any((*named["vllm"], self.vllm_key_file)),
                "local starts a pair of its own: it excludes vllm_prefill, vllm_decode and "
                "vllm_key_file",
            ),
            *(
                (
                    self.engine != engine and any(map(self._is_changed, names)),
                    f'{", ".join(names)} need engine = "{engine}"',
                )
                for engine, names in _OF_ENGINES.items()
            ),
            (
                bool(unused),
                f'{"".join(unused[:1])} has no use with engine = "{self.engine}": its servers are '
                "configured where they run",
            ),
            (
                together and (self.prefill > 0 or self.decode > 0),
                f"colocated = {self.colocated} excludes {split}: give one or the other",
            ),
            (
                not together and (self.prefill == 0 or self.decode == 0),
                f"{split}: each must be at least 1, or colocated above 0",
            ),
            (
                together and moves,
                "transport and mooncake_protocol have no use with colocated: no page is moved",
            ),
            (
                self.mooncake_protocol == "rdma" and self.transport != "mooncake",
                'mooncake_protocol = "rdma" needs transport = "mooncake"',
            ),
            (
                bool(self.mooncake_device) and self.mooncake_protocol != "rdma",
                'mooncake_device needs mooncake_protocol = "rdma"',
            ),
            (
                self.device == "cuda" and not together,
                'device = "cuda" needs colocated nodes: pages are moved between CPU pools only',
            ),
            (
                isinstance(self.pool_tokens, int) and self.pool_tokens < self.page_size,
                f"pool_tokens = {self.pool_tokens} is below one page of {self.page_size} tokens",
            ),
        )

    def _servers_of(self, engine: str) -> tuple[str, str]:
        return getattr(self, f"{engine}_prefill"), getattr(self, f"{engine}_decode")

    def _is_changed(self, name: str) -> bool:
        """Whether it differs from its default; so does a default that other settings decide."""
        field = type(self).model_fields[name]
        default = field.get_default(call_default_factory=True, validated_data={"colocated": 0})
        return bool(getattr(self, name) != default)

    def resolved(self) -> dict[str, Resolved]:
        """Each setting in order of declaration; a password in the database URL is masked."""
        shown: dict[str, Resolved] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name == "database":
                value = mask_password(value)
            elif isinstance(value, Path):
                value = str(value)
            shown[name] = Resolved(value, self._sources.get(name, "default"))
        return shown


def parse_servers(text: str) -> list[tuple[str, int]]:
    """The servers of ``sglang_prefill`` and the like: URL and bootstrap port, 0 if none is
    given.

    Raises:
        ValueError: one is no URL of a server, or occurs twice.
    """
    servers: list[tuple[str, int]] = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        match = _SERVER.fullmatch(part)
        if match is None or (match[2] and not 0 < int(match[2]) < 65536):
            raise ValueError("not the URL of a server")
        servers.append((match[1], int(match[2] or 0)))
    if len({url for url, _ in servers}) != len(servers):
        raise ValueError("a server occurs twice")
    return servers


def mask_password(url: str) -> str:
    """The URL with ``***`` for a password before the host or in the query."""
    # Greedy up to the last @: an unescaped one inside a password must not uncover its tail.
    url = re.sub(r"(://[^:/@]*:).*@", r"\1***@", url, flags=re.DOTALL)
    return re.sub(r"([?&][a-z_]*password=)[^&]*", r"\1***", url, flags=re.IGNORECASE)


def _name_of(model: str) -> str:
    return DEMO_NAME if model == DEMO_MODEL else Path(model).absolute().name
