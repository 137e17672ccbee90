"""``sekisho serve`` with the demo model, as a user runs it: what it prints, what the official
client gets, and how it ends. The tests of this file share one platform; the last one ends it."""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

import official_client
from official_client import CHECKS, Customer
from platform_kit import TENANTS, Client, begins
from serve_kit import SEKISHO, Served, is_alive, serve

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    state = tmp_path_factory.mktemp("state")
    command = [SEKISHO, "serve", "--state-dir", str(state), "--pool-tokens", "2048"]
    with serve(command, "--port", "0", environ={}) as running:
        yield running


@pytest.fixture(scope="module")
def customer(served: Served) -> Iterator[Customer]:
    with Customer(f"{served.url}/v1", served.keys[TENANTS[0]]) as made:
        yield made


def test_it_prints_url_keys_and_a_curl_line_that_works(served: Served) -> None:
    assert (served.model, served.tokens_max) == ("SmolLM2-135M-Instruct", 2048)
    assert tuple(served.keys) == TENANTS
    curl, url, *options = shlex.split(served.curl)
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
            os.killpg(served.process.pid, signal.SIGINT)
            answer = await stream
        assert answer.error is None
        assert answer.done
        assert answer.finish in ("length", "stop")

    processes = [served.process.pid, *served.nodes()]
    assert len(processes) >= 3, "gateway, prefill, decode"
    asyncio.run(scenario())
    assert served.wait() == 0, served.log()
    assert not [pid for pid in processes if is_alive(pid)]
    assert not served.left_behind()
    assert "Traceback" not in served.log()


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
        (["--database", "sqlite:///{folder}/no/such/folder.db"], {}, "folder.db"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_configuration_is_one_line_and_exit_code_2(
    tmp_path: Path, flags: list[str], environ: dict[str, str], told: str
) -> None:
    (tmp_path / "typo.toml").write_text('isolatoin = "strict"\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"folder": tmp_path, "port": taken.getsockname()[1]}
        ended = subprocess.run(
            [SEKISHO, "serve", "--state-dir", str(tmp_path / "state")]
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
