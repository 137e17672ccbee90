"""The whole command against real local servers: exit codes, formats, keys, watching."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from gate_kit import Engine, response, running, saying, sglang, vllm
from sekisho.cli import gate as command

KEY = "sk-planted-c3d1"
FORMATS = ("text", "json", "junit", "sarif", "github", "markdown")


def run(*arguments: str) -> int:
    code = command.app(args=list(arguments), standalone_mode=False)
    return code if isinstance(code, int) else 0


def pair(prefill: Engine, decode: Engine) -> list[str]:
    return ["--sglang-prefill", prefill.url, "--sglang-decode", decode.url]


@pytest.mark.parametrize("form", FORMATS)
def test_the_inverted_pair_exits_1_in_every_format(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(sglang("0.5.23-prefill"), sglang("0.5.23-decode")) as [prefill, decode]:
        code = run(*pair(prefill, decode), "--advertised", "4096", "--format", form)
    said = capsys.readouterr().out
    assert code == 1
    assert "prefill holds 1018 tokens, 4096 are advertised" in said.replace("&#39;", "'")


def test_the_other_exit_codes(tmp_path: Path) -> None:
    with running(vllm()) as [engine]:
        file = tmp_path / "c.toml"
        file.write_text(f'[[models]]\nname = "m"\n[[models.engines]]\nurl = "{engine.url}"\n')
        assert run(str(file)) == 0
        assert run("check", str(file), "--margin", "99", "--margin-is-required") == 1
        assert run(str(file), "--output", str(tmp_path / "absent" / "x")) == 2
    assert run(str(file)) == 3


def test_output_goes_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(vllm()) as [engine]:
        file = tmp_path / "result.json"
        assert run("--vllm", engine.url, "--format", "json", "--output", str(file)) == 0
    assert json.loads(file.read_text())["exit_code"] == 0
    assert not capsys.readouterr().out


@pytest.mark.parametrize("form", FORMATS)
def test_no_format_shows_a_key(
    form: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PLANTED", KEY)
    (tmp_path / "key").write_text(f"{KEY}\n")
    echo = sglang("0.5.20", api_key=KEY, admin_api_key=KEY, served_model_name=KEY, version=KEY)
    broken = {"*": saying(response(KEY.encode(), 500, {"X-Key": KEY}))}
    with running(echo, broken, sglang("0.5.20", api_key="sk-of-the-engine")) as [a, b, c]:
        keys = ["--key-env", f"{a.url}=PLANTED", "--key-file", f"{b.url}={tmp_path / 'key'}"]
        urls = ["--engine", a.url, "--engine", b.url, "--sglang", c.url]
        run(*urls, *keys, "--advertised", "10", "--format", form)
        assert (a.keys(), b.keys(), c.keys()) == ({f"Bearer {KEY}"}, {f"Bearer {KEY}"}, set())
    said = "".join(capsys.readouterr())
    assert KEY not in said
    assert "sk-of-the-engine" not in said


def test_watch_follows_an_engine_that_restarts_with_a_smaller_pool() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running(vllm()) as [engine]:
        script = "from sekisho.cli.gate import app; app()"
        arguments = ["--vllm", engine.url, "--watch", "1", "--watch-port", str(port)]
        with subprocess.Popen(
            [sys.executable, "-c", script, *arguments], stdout=subprocess.DEVNULL, env=os.environ
        ) as process:
            try:
                waited(port, "sekisho_gate_holds 1.0")
                text = engine.answers["/metrics"]
                assert isinstance(text, bytes)
                small = text.replace(b'num_gpu_blocks="364"', b'num_gpu_blocks="8"')
                engine.answers = {**engine.answers, "/metrics": small}
                waited(port, "sekisho_gate_holds 0.0")
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 1
            finally:
                process.kill()


def waited(port: int, line: str) -> None:
    """Until the metrics have this line."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                if line in answer.read().decode():
                    return
        except OSError:
            pass
        time.sleep(0.05)
    pytest.fail(f"the metrics never said {line}")
