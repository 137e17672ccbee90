"""``sekisho serve`` with the demo model, as a user runs it: what it prints, what the official
client gets, and how it ends. The tests of this file share one platform; the last one ends it."""

import asyncio
import os
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

import official_client
from official_client import CHECKS, Customer
from platform_kit import TENANTS, Client, begins, wait_for
from serve_kit import SEKISHO, Launched, Served, is_alive, launch, serve

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    state = tmp_path_factory.mktemp("state")
    with serve(command(state)) as running:
        yield running


def command(state: Path) -> list[str]:
    flags = ("--state-dir", str(state), "--pool-tokens", "2048", "--port", "0")
    return [SEKISHO, "serve", *flags]


@pytest.fixture(scope="module")
def customer(served: Served) -> Iterator[Customer]:
    with Customer(f"{served.url}/v1", served.keys[TENANTS[0]]) as made:
        yield made


def test_it_prints_url_keys_and_a_curl_line_that_works(served: Served) -> None:
    assert (served.model, served.tokens_max) == ("SmolLM2-135M-Instruct", 2048)
    assert tuple(served.keys) == TENANTS
    curl, url, *options = shlex.split(served.curl.replace("\\\n", " "))
    assert curl == "curl"
    assert options[::2] == ["-H", "-H", "-d"]
    headers = dict(line.split(": ") for line in options[1:-1:2])
    answer = httpx2.post(
        url, headers=headers, content=options[-1].encode(), timeout=600.0, trust_env=False
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]


def test_both_tenants_are_answered_and_models_shows_the_limit(served: Served) -> None:
    for key in served.keys.values():
        with Customer(f"{served.url}/v1", key) as one:
            assert one.limit == served.tokens_max
            official_client.chat(one)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_official_client(customer: Customer, check: Callable[[Customer], None]) -> None:
    check(customer)


def test_ctrl_c_lets_running_streams_end_and_leaves_nothing(served: Served) -> None:
    async def scenario() -> None:
        key = served.keys[TENANTS[0]]
        async with Client(served.url, key, served.model) as client:
            begun = asyncio.Event()
            asked = client.ask("Once upon a time", begins(begun), max_tokens=48)
            stream = asyncio.create_task(asked)
            await begun.wait()
            served.interrupt()
            answer = await stream
        assert answer.error is None
        assert answer.done
        assert answer.finish in ("length", "stop")

    processes = served.processes()
    assert len(processes) >= 3, "gateway, prefill, decode"
    asyncio.run(scenario())
    check_ended_well(served, processes)


def test_ctrl_c_while_the_model_loads_leaves_nothing(tmp_path: Path) -> None:
    with launch(command(tmp_path)) as launched:
        wait_for(lambda: "weights" in launched.log() or None, "a node that loads", launched.log)
        processes = launched.processes()
        launched.interrupt()
        assert launched.output() == ""
        check_ended_well(launched, processes)


def check_ended_well(launched: Launched, processes: list[int]) -> None:
    assert launched.wait() == 0, launched.log()
    assert not [pid for pid in processes if is_alive(pid)]
    assert not launched.left_behind()
    assert "Traceback" not in launched.log()


@pytest.mark.parametrize(
    ("flags", "environ", "told"),
    [
        (["--isolaton", "strict"], {}, "--isolaton"),
        ([], {"SEKISHO_POOL_TOKEN": "4096"}, "SEKISHO_POOL_TOKENS"),
        (["--file", "{folder}/typo.toml"], {}, "isolation"),
        (["--file", "{folder}/missing.toml"], {}, "missing.toml"),
        (["--model", "{folder}/nowhere"], {}, "nowhere"),
        (["--model", "{folder}"], {}, "config.json"),
        (["--pool-tokens", "8"], {}, "pool_tokens"),
        (["--colocated", "1", "--decode", "2"], {}, "colocated"),
        (["--port", "{port}"], {}, "{port}"),
        (
            [],
            {"TMPDIR": "{folder}/" + 60 * "t"},
            "TMPDIR",
        ),
        (["--database", "sqlite:///{folder}/no/such/folder.db"], {}, "database"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_configuration_is_one_line_and_exit_code_2(
    tmp_path: Path, flags: list[str], environ: dict[str, str], told: str
) -> None:
    environ = {name: value.format(folder=tmp_path) for name, value in environ.items()}
    Path(environ.get("TMPDIR", tmp_path)).mkdir(exist_ok=True)
    (tmp_path / "typo.toml").write_text('isolatoin = "strict"\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"folder": tmp_path, "port": taken.getsockname()[1]}
        ended = subprocess.run(
            [SEKISHO, "serve", "--port", "0", "--state-dir", str(tmp_path / "state")]
            + [flag.format(**names) for flag in flags],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    [line] = ended.stderr.splitlines()
    assert line.startswith("sekisho: ")
    assert told.format(**names) in line


@pytest.mark.parametrize("roles", [["--colocated", "1"], ["--transport", "memory"]], ids=" ".join)
def test_a_pool_above_the_memory_ends_with_its_size_and_exit_code_2(
    tmp_path: Path, roles: list[str]
) -> None:
    ended = subprocess.run(
        [
            SEKISHO,
            "serve",
            "--port=0",
            f"--state-dir={tmp_path}",
            *roles,
            "--pool-tokens=100000000000",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ended.returncode == 2, ended.stderr
    assert "bytes of memory" in ended.stderr
    assert "Traceback" not in ended.stderr
