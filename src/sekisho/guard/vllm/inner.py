"""The inner connector: how it is made, and what the guard must know of each kind.

Its configuration is the one of ``kv_transfer_config`` under its own name: ``inner`` and
``inner_module_path`` in ``kv_connector_extra_config`` name it, everything else there is its own.
"""

import dataclasses
from copy import copy
from typing import Any

from sekisho.guard.vllm.kind import InnerError, Kind
from sekisho.guard.vllm.mooncake import Mooncake
from sekisho.guard.vllm.nixl import Nixl
from sekisho.guard.vllm.versions import CONNECTORS, supported

INNER, MODULE = "inner", "inner_module_path"
_KINDS: dict[str, type[Kind]] = {"MooncakeConnector": Mooncake, "NixlConnector": Nixl}


def kind_of(vllm_config: Any) -> Kind:
    """What the guard must know of the connector that this configuration names."""
    transfer = own_config(vllm_config).kv_transfer_config
    kind = _KINDS[transfer.kv_connector]()
    kind.check_options(transfer.kv_connector_extra_config)
    return kind


def own_config(vllm_config: Any) -> Any:
    """vLLM's configuration as the inner connector would see it without the guard."""
    outer = vllm_config.kv_transfer_config
    extra = dict(outer.kv_connector_extra_config)
    name, module = extra.pop(INNER, None), extra.pop(MODULE, None)
    if not isinstance(name, str):
        raise InnerError(f"kv_connector_extra_config names no {INNER!r} connector")
    known = CONNECTORS.get(name)
    if known is None:
        raise InnerError(f"the connector {name} was not tried: {supported(CONNECTORS)}")
    if not known.supported:
        raise InnerError(f"the connector {name} is not supported: {_why(name, known.how, extra)}")
    transfer = copy(outer)
    transfer.kv_connector, transfer.kv_connector_module_path = name, module
    transfer.kv_connector_extra_config = extra
    config = copy(vllm_config)
    config.kv_transfer_config = transfer
    return config


def class_of(vllm_config: Any) -> Any:
    """The inner connector's class."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory.get_connector_class(own_config(vllm_config).kv_transfer_config)


def with_sidecar(kv_cache_config: Any, name: str) -> Any:
    """The same with one more layer in its only group: it has the group's block ids."""
    [group] = kv_cache_config.kv_cache_groups
    more = dataclasses.replace(group, layer_names=[*group.layer_names, name])
    return dataclasses.replace(kv_cache_config, kv_cache_groups=[more])


def sidecar_name(kv_cache_config: Any) -> str:
    """A layer behind the last one, alike in both roles."""
    [group] = kv_cache_config.kv_cache_groups
    return f"sekisho.layers.{len(group.layer_names)}.attn"


def _why(name: str, how: str, extra: dict[str, Any]) -> str:
    """Of several connectors in one, the first that is not supported itself is named."""
    listed = extra.get("connectors") if name == "MultiConnector" else None
    for one in listed if isinstance(listed, list) else ():
        child = str(one.get("kv_connector")) if isinstance(one, dict) else str(one)
        if child not in CONNECTORS or not CONNECTORS[child].supported:
            return f"its {child} is not, either"
    return how
