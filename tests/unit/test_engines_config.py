"""The settings of foreign servers, and ``sekisho serve`` in front of local ones."""

import asyncio
import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from sekisho.config import ConfigError, load_settings
from serve_kit import SEKISHO, serve
from sglang_kit import Server, recorded, saying, server

P, D = "http://10.0.0.1:30000", "http://10.0.0.2:30000"
HOME = {"HOME": "/home-of-nobody"}
NONE = {"vllm_prefill": "", "vllm_decode": ""}
BOTH: dict[str, object] = {"engine": "sglang", "sglang_prefill": P, "sglang_decode": D}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_servers_come_from_flags_variables_and_a_file(tmp_path: Path) -> None:
    two = f"{P}@8998,{P}1"
    file = tmp_path / "given.toml"
    file.write_text(
        f'engine = "sglang"\nsglang_prefill = ["{P}@8998", "{P}1"]\nsglang_decode = "{D}"\n'
    )
    environ = {
        "SEKISHO_ENGINE": "sglang",
        "SEKISHO_SGLANG_PREFILL": two,
        "SEKISHO_SGLANG_DECODE": D,
    }
    for settings in (
        load_settings({**BOTH, "sglang_prefill": [f"{P}@8998", f"{P}1"]}, HOME, None),
        load_settings({}, HOME | environ, None),
        load_settings({}, HOME, file),
    ):
        assert settings.sglang_prefill == two
        assert settings.sglang_decode == D
        assert settings.resolved()["sglang_prefill"].value == two


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"sglang_decode": ""}, 'engine = "sglang" needs sglang_prefill and sglang_decode'),
        ({"engine": "vllm2"}, "want sekisho"),
        ({"engine": "sekisho"}, 'need engine = "sglang"'),
        ({"sglang_prefill": "10.0.0.1:30000"}, "http://host:port"),
        ({"sglang_prefill": "ftp://host:1"}, "http://host:port"),
        ({"sglang_prefill": "http://user:pass@host:1"}, "http://host:port"),
        ({"sglang_prefill": f"{P}/v1"}, "http://host:port"),
        ({"sglang_prefill": f"{P}@0"}, "http://host:port"),
        ({"sglang_prefill": f"{P}@99999"}, "http://host:port"),
        ({"sglang_prefill": f"{P},{P}@1"}, "each once"),
        ({"sglang_decode": f"{D}@8998"}, "http://host:port"),
        ({"sglang_decode": [D, D]}, "each once"),
        ({"prefill": "2"}, "prefill has no use"),
        ({"pool_tokens": "4096"}, "pool_tokens has no use"),
        ({"isolation": "off"}, "isolation has no use"),
        (
            {
                "engine": "sekisho",
                "sglang_prefill": "",
                "sglang_decode": "",
                "sglang_key_file": "k",
            },
            'need engine = "sglang"',
        ),
    ],
)
def test_servers_that_cannot_be_used_are_refused_in_one_line(
    changed: dict[str, object], part: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings({**BOTH, **changed}, HOME, None)
    assert str(refused.value).isprintable()
    assert part in str(refused.value)


VLLM: dict[str, object] = {
    "engine": "vllm",
    "vllm_prefill": f"{P}@8998",
    "vllm_decode": D,
}


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"vllm_prefill": P}, "http://host:port@BOOTSTRAP_PORT"),
        ({"vllm_prefill": [f"{P}@8998", f"{P}1"]}, "http://host:port@BOOTSTRAP_PORT"),
        ({"vllm_decode": f"{D}@8998"}, "http://host:port"),
        ({"vllm_decode": ""}, 'engine = "vllm" needs vllm_prefill and vllm_decode'),
        ({"sglang_decode": D}, 'need engine = "sglang"'),
        ({"engine": "sglang", "sglang_prefill": P, "sglang_decode": D}, 'need engine = "vllm"'),
        ({"local": True}, "local starts a pair of its own"),
        ({"local": True, "vllm_prefill": ""}, "local starts a pair of its own"),
        ({"local": True, "engine": "sekisho", **NONE}, 'need engine = "vllm"'),
        ({"local": "perhaps"}, "true or false"),
        ({"local": 1.5}, "true or false"),
        ({**NONE, "local": True, "vllm_key_file": "k"}, "local starts a pair of its own"),
        ({"page_size": "32"}, "page_size has no use"),
    ],
)
def test_vllm_servers_that_cannot_be_used_are_refused_in_one_line(
    changed: dict[str, object], part: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings({**VLLM, **changed}, HOME, None)
    assert str(refused.value).isprintable()
    assert part in str(refused.value)


def test_a_local_pair_is_named_by_flag_variable_or_file(tmp_path: Path) -> None:
    file = tmp_path / "given.toml"
    file.write_text('engine = "vllm"\nlocal = true\n')
    environ = {"SEKISHO_ENGINE": "vllm", "SEKISHO_LOCAL": "true"}
    for settings in (
        load_settings({"engine": "vllm", "local": True}, HOME, None),
        load_settings({}, HOME | environ, None),
        load_settings({}, HOME, file),
    ):
        assert settings.local
        assert settings.resolved()["local"].value is True
    assert not load_settings(VLLM, HOME, None).local


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """The servers on a thread of their own, for a command in a process of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait(work: str) -> None:
        for each in servers:
            asyncio.run_coroutine_threadsafe(getattr(each, work)(), loop).result(30)

    try:
        wait("start")
        yield
    finally:
        wait("stop")
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def command(folder: Path, *servers: Server) -> list[str]:
    named = [part for each in servers for part in (f"--sglang-{each.role}", each.url)]
    state = ["--state-dir", str(folder / "state"), "--port", "0"]
    return [SEKISHO, "serve", "--engine", "sglang", *named, *state]


def test_sekisho_serve_refuses_an_unguarded_server_in_one_line(tmp_path: Path) -> None:
    prefill, decode = server("prefill", saying(b"")), server("decode", saying(b""), said=False)
    with running(prefill, decode):
        done = subprocess.run(
            command(tmp_path, prefill, decode),
            capture_output=True,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("SEKISHO_")},
            check=False,
        )
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[-1].startswith(f"sekisho: decode {decode.url}: ")
    assert "guard is not active" in lines[-1]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_two_tenants_of_sekisho_serve_get_answers_under_keys_of_their_own(tmp_path: Path) -> None:
    prefill, decode = (server(r, saying(recorded("greedy", r))) for r in ("prefill", "decode"))
    question = {"role": "user", "content": "What is a checkpoint? Answer in one sentence."}
    (tmp_path / "key").write_text("the-servers-key\n")
    key_file = ["--sglang-key-file", str(tmp_path / "key")]
    with (
        running(prefill, decode),
        serve([*command(tmp_path, prefill, decode), *key_file]) as served,
    ):
        body = {"model": served.model, "messages": [question], "temperature": 0, "max_tokens": 64}
        for key in (*served.keys.values(), served.keys["tenant-a"]):
            answer = httpx2.post(
                f"{served.url}/v1/chat/completions",
                json=body,
                headers={"authorization": f"Bearer {key}"},
            )
            assert answer.status_code == 200
            said = answer.json()
            assert said["choices"][0]["message"]["content"].startswith("A checkpoint is a critical")
            assert said["usage"]["completion_tokens"] == 33
        first, second, again = (asked["extra_key"] for asked in decode.asked)
        assert first == again != second
        log = served.log() + served.output()
        assert first not in log
        assert second not in log
        served.interrupt()
        assert served.wait() == 0
        assert {each.get("authorization") for each in decode.headers} == {"Bearer the-servers-key"}
        assert "the-servers-key" not in log
    assert re.search(r"guard 0\.1\.0", log)
