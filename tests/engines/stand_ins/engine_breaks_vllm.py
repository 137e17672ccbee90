"""vLLM as some other version of it might be, chosen by ``ENGINE_BREAK_VLLM`` before the start.

parameter   one function that the guard holds has a parameter of another name
method      connectors have one more method, which the guard would not hand on
version     vLLM says that it is 0.99.0
"""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

BREAK = os.environ.get("ENGINE_BREAK_VLLM", "")


def _parameter(module: ModuleType) -> None:
    original = module.BlockPool.free_blocks

    def free_blocks(self: Any, blocks: Any) -> Any:
        return original(self, blocks)

    module.BlockPool.free_blocks = free_blocks


def _method(module: ModuleType) -> None:
    module.KVConnectorBase_V1.bring_your_own_blocks = lambda self: None


def _version(module: ModuleType) -> None:
    module.__dict__["__version__"] = "0.99.0"


_ALL: dict[str, tuple[str, Callable[[ModuleType], None]]] = {
    "parameter": ("vllm.v1.core.block_pool", _parameter),
    "method": ("vllm.distributed.kv_transfer.kv_connector.v1.base", _method),
    "version": ("vllm", _version),
}
HOOKS = (_ALL[BREAK],) if BREAK else ()
