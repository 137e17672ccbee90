"""docs/guard-sglang.md says what the code says: versions, refusals, metrics, kinds, statuses."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sekisho.core import table
from sekisho.guard.sglang import admission, start
from sekisho.guard.sglang.plugin import VARIABLE, all_seams
from sekisho.guard.sglang.versions import VERSIONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guard-sglang.md").read_text(encoding="utf-8")
FOLDER = Path(start.__file__).parent
CODE = "\n".join(path.read_text() for path in [*FOLDER.glob("*.py"), FOLDER.parent / "keeper.py"])


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(title: str) -> list[list[str]]:
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_versions_is_the_versions() -> None:
    expected = [[v, "yes" if k.supported else "no", k.how] for v, k in VERSIONS.items()]
    assert rows("Which versions") == expected


def test_every_seam_of_the_table_is_held() -> None:
    held = {seam.target.rpartition(".")[2] for seam in all_seams()}
    cells = [cell for _, cell, *_ in rows("What is checked, and where")]
    named = {name.split(".")[-1] for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
    assert len(named) > 6
    assert named <= held


def test_each_refused_feature_is_on_the_page() -> None:
    text = section("What does not start")
    for name in start._UNKNOWN_FEATURES:
        assert f"`{name}`" in text
    for name in (*start._POOLS, *start._UNKNOWN_PATHS):
        assert f"`{name}`" in text


def scheduler(**changed: Any) -> Any:
    """As far as `start.unsupported` looks at one."""
    pool = type(changed.pop("pool", "MHATokenToKVPool"), (), {})()
    page_size = changed.pop("page_size", 16)
    args = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "mooncake"}
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    return SimpleNamespace(
        server_args=SimpleNamespace(**(args | changed)),
        page_size=page_size,
        token_to_kv_pool_allocator=allocator,
    )


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_what_the_guard_knows_starts(mode: str) -> None:
    assert start.unsupported(scheduler(disaggregation_mode=mode, page_size=64, pp_size=1)) == ""
    assert start.unsupported(scheduler(pool="MLATokenToKVPool")) == ""


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"disaggregation_mode": "null"}, "--disaggregation-mode is null"),
    ({"page_size": 1}, "--page-size is 1"),
    ({"page_size": 24}, "--page-size is 24"),
    ({"pool": "HybridLinearKVPool"}, "the KV pool is a HybridLinearKVPool"),
]
REFUSED += [
    ({"disaggregation_transfer_backend": name}, f"--disaggregation-transfer-backend is {name}")
    for name in ("nixl", "mori", "ascend")
]
REFUSED += [
    ({name: 2}, f"--{name.replace('_', '-')} is above 1")
    for name in re.findall(r"`(\w+_size)`", section("What does not start"))
]
REFUSED += [
    ({name: True}, f"--{name.replace('_', '-')} is set") for name in start._UNKNOWN_FEATURES
]


@pytest.mark.parametrize(("changed", "reason"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_the_page_says_does_not_start_does_not(
    changed: dict[str, object], reason: str
) -> None:
    said = start.unsupported(scheduler(**changed))
    assert said.startswith(reason)
    assert "\n" not in said


@pytest.mark.parametrize("name", start._UNKNOWN_PATHS)
def test_a_path_that_carries_no_headers_does_not_start(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "0")
    assert start.unsupported(scheduler()) == ""
    monkeypatch.setenv(name, "1")
    assert start.unsupported(scheduler()).startswith(f"{name} is set")


def test_the_table_of_metrics_is_the_metrics() -> None:
    made = re.findall(r"(Counter|Gauge)\(\s*\"(\w+)\"", (FOLDER / "report.py").read_text())
    expected = [name + ("_total" if kind == "Counter" else "") for kind, name in made]
    assert [row[0].strip("`") for row in rows("Metrics and evidence")] == expected


def test_every_kind_of_evidence_and_refusal_is_on_the_page() -> None:
    text = section("Metrics and evidence")
    kinds = set(re.findall(r"Evidence\(\s*\"(\w+)\"", CODE))
    kinds |= set(re.findall(r"return \"(\w+)\"", Path(table.__file__).read_text()))
    kinds |= set(re.findall(r"return \"(\w+)\", ", Path(admission.__file__).read_text()))
    assert {"unwritten", "row", "prefix", "length", "verdict"} <= kinds
    assert [kind for kind in sorted(kinds) if f"`{kind}`" not in text] == []


def test_the_statuses_are_those_that_sglang_keeps() -> None:
    assert [row[0] for row in rows("How a request fails")] == ["400", "500", "503"]


def test_the_variable_and_the_extra_are_named_as_they_are() -> None:
    text = section("Install and start")
    assert f"`{VARIABLE}` is `on` or `off`" in text
    extra = re.search(r"^sglang = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra is not None
    assert extra[1] == "", "the page says that the extra brings no package"
