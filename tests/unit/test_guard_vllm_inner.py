"""Which connectors may go on moving blocks under the guard: the others end the engine's start."""

from types import SimpleNamespace
from typing import Any

import pytest

from sekisho.guard.vllm import inner
from sekisho.guard.vllm.kind import InnerError
from sekisho.guard.vllm.mooncake import Mooncake
from sekisho.guard.vllm.versions import CONNECTORS

REFUSED = sorted(name for name, known in CONNECTORS.items() if not known.supported)


def _config(**extra: Any) -> Any:
    transfer = SimpleNamespace(
        kv_connector="SekishoConnector",
        kv_connector_module_path="sekisho.guard.vllm.connector",
        kv_connector_extra_config=extra,
    )
    return SimpleNamespace(kv_transfer_config=transfer)


def test_mooncake_gets_its_own_options_and_no_more() -> None:
    config = _config(inner="MooncakeConnector", mooncake_protocol="tcp")
    own = inner.own_config(config).kv_transfer_config
    assert own.kv_connector == "MooncakeConnector"
    assert own.kv_connector_extra_config == {"mooncake_protocol": "tcp"}
    assert isinstance(inner.kind_of(config), Mooncake)
    assert config.kv_transfer_config.kv_connector == "SekishoConnector", "vLLM's own is as it was"


@pytest.mark.parametrize("name", REFUSED)
def test_what_was_not_shown_to_work_does_not_start_and_says_why(name: str) -> None:
    with pytest.raises(InnerError) as caught:
        inner.kind_of(_config(inner=name))
    assert name in str(caught.value)
    assert CONNECTORS[name].how in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "NixlPushConnector", "SekishoConnector", None, 7])
def test_what_nobody_tried_does_not_start(name: Any) -> None:
    with pytest.raises(InnerError):
        inner.kind_of(_config(inner=name))


def test_whatever_may_start_is_known_in_full() -> None:
    for name, known in CONNECTORS.items():
        assert not known.supported or name in inner._KINDS


@pytest.mark.parametrize(
    ("children", "named"),
    [
        ([{"kv_connector": "MooncakeConnector"}, {"kv_connector": "ExampleConnector"}], "Example"),
        ([{"kv_connector": "MooncakeConnector"}, {"kv_connector": "Unheard"}], "Unheard"),
        (["nonsense"], "nonsense"),
    ],
)
def test_of_several_in_one_the_child_that_is_not_supported_is_named(
    children: list[Any], named: str
) -> None:
    with pytest.raises(InnerError, match=f"its {named}.* is not, either"):
        inner.kind_of(_config(inner="MultiConnector", connectors=children))


@pytest.mark.parametrize("children", [[{"kv_connector": "MooncakeConnector"}], [], None])
def test_several_in_one_are_refused_even_of_supported_ones(children: Any) -> None:
    with pytest.raises(InnerError, match="MultiConnector is not supported"):
        inner.kind_of(_config(inner="MultiConnector", connectors=children))
