"""Answers that no engine should give: never a pass, always a sentence, never a key."""

import asyncio
import datetime
import gzip
import json
import logging

import pytest

from gate_kit import Speak, judged, response, running, saying, sglang, vllm
from sekisho.gate.fetch import Key, parse_url
from sekisho.gate.model import ClaimError
from sekisho.gate.policy import Waiver
from sekisho.gate.run import Target

KEY = "sk-planted-5f0c9d"


async def slow(writer: asyncio.StreamWriter, _path: str) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(60)


async def dripping(writer: asyncio.StreamWriter, _path: str) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)


async def endless(writer: asyncio.StreamWriter, _path: str) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"[" * 65536)
        await writer.drain()


HOSTILE: dict[str, bytes | Speak] = {
    "html": b"<html>Welcome</html>",
    "empty": b"",
    "not JSON": b"{",
    "cut off JSON": b'{"max_total_num_tokens": 4',
    "no UTF-8": b"\xff\xfe{}",
    "another shape": b"[1, 2]",
    "nothing in it": b"{}",
    "deep": b"[" * 100_000,
    "cut off body": saying(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}"),
    "no HTTP": saying(b"220 mail ESMTP\r\n"),
    "closed": saying(b""),
    "redirect away": saying(response(b"", 302, {"Location": "http://127.0.0.2:1/"})),
    "redirect in a circle": saying(response(b"", 302, {"Location": "/server_info"})),
    "redirect to nothing": saying(response(b"", 301)),
    "error": saying(response(b"{}", 500)),
    "wants a key": saying(response(b"{}", 401)),
    "teapot": saying(response(b"{}", 418)),
    "compressed": saying(
        response(gzip.compress(b" " * 50_000_000), headers={"Content-Encoding": "gzip"})
    ),
    "slow": slow,
    "dripping": dripping,
    "endless": endless,
}


@pytest.mark.parametrize("path", ["/server_info", "/v1/loads", "/v1/models"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_answer_is_inconclusive_with_a_sentence(name: str, path: str) -> None:
    answers = {**sglang("0.5.20"), path: HOSTILE[name]}
    with running(answers) as [engine]:
        target = Target(source=engine.url, kind="sglang", model="m")
        result = judged(target, window=16, timeout_s=1.0)
    assert result.exit_code() == 3
    assert not result.readings
    assert 10 < len(result.unread[0].reason) < 300, result.unread[0]
    assert {f.rule for f in result.findings} >= {"GATE003"}


def test_every_engine_hostile_is_undetected_and_inconclusive() -> None:
    with running(*({"*": answer} for answer in HOSTILE.values())) as engines:
        result = judged(*(Target(source=e.url) for e in engines), window=1, timeout_s=1.0)
    assert len(result.unread) == len(HOSTILE)
    assert result.exit_code() == 3


def test_nobody_there_is_inconclusive() -> None:
    with running({}) as [engine]:
        url = engine.url
    result = judged(Target(source=url), window=1)
    assert result.exit_code() == 3
    assert result.unread[0].inconclusive


LIES: list[dict[str, object]] = [
    {"max_total_num_tokens": value}
    for value in (None, True, "4096", 4096.5, -4096, 0, 2**60, 10**30, [4096])
]
LIES += [{name: -1} for name in ("max_req_input_len", "page_size", "context_length", "dp_size")]
LIES += [{"page_size": 0}, {"internal_states": []}, {"disaggregation_mode": "both"}, {"dp_size": 0}]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_number_that_is_none_is_not_believed(lie: dict[str, object]) -> None:
    with running(sglang("0.5.20", **lie)) as [engine]:
        result = judged(Target(source=engine.url), window=16)
    assert result.exit_code() == 3
    assert not result.readings


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('num_gpu_blocks="364"', 'num_gpu_blocks="-364"'),
        ('num_gpu_blocks="364"', 'num_gpu_blocks="3.5"'),
        ('num_gpu_blocks="364"', 'num_gpu_blocks="None"'),
        ('num_gpu_blocks="364"', 'num_gpu_blocks="٣٦٤"'),
        ('num_gpu_blocks="364"', 'num_gpu_blocks="9999999999999999999999"'),
        ('block_size="128"', 'block_size="0"'),
        ("vllm:cache_config_info{", "vllm:other{"),
        ("vllm:cache_config_info{", "vllm:cache_config_info{{"),
        ('"} 1.0', '"'),
    ],
)
def test_prometheus_text_that_is_wrong_is_not_believed(old: str, new: str) -> None:
    answers = vllm()
    text = answers["/metrics"]
    assert isinstance(text, bytes)
    assert old.encode() in text
    answers["/metrics"] = text.replace(old.encode(), new.encode())
    with running(answers) as [engine]:
        result = judged(Target(source=engine.url), window=16)
    assert result.exit_code() == 3
    assert not result.readings


def test_prometheus_text_cut_off_anywhere_never_passes_the_real_window() -> None:
    text = vllm()["/metrics"]
    assert isinstance(text, bytes)
    for size in range(0, len(text) - 1, 997):
        with running({**vllm(), "/metrics": text[:size]}) as [engine]:
            result = judged(Target(source=engine.url), window=46465)
        assert result.exit_code() != 0


@pytest.mark.parametrize("hostile", ["m\n::error::x", "<b>|m|", "\x1b[31m", "m" * 10_000])
def test_a_name_that_an_engine_states_stays_on_one_short_line(hostile: str) -> None:
    with running(sglang("0.5.20", served_model_name=hostile, version=hostile)) as [engine]:
        result = judged(Target(source=engine.url), window=16)
    for reading in result.readings:
        assert reading.model.isprintable()
        assert len(reading.model) <= 201
        assert reading.version.isprintable()


def test_a_key_goes_to_its_host_and_into_no_word_of_ours(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    lying = sglang("0.5.20", api_key=KEY, admin_api_key=KEY, served_model_name=KEY, version=KEY)
    away = {"*": saying(response(b"", 302, {"Location": "http://127.0.0.2:1/"}))}
    broken = {"*": KEY.encode()}
    with running(lying, away, broken, sglang("0.5.20")) as engines:
        keyed = [Target(source=e.url, key=Key(KEY), model="") for e in engines[:3]]
        result = judged(*keyed, Target(source=engines[3].url), window=1)
        assert [bool(e.keys()) for e in engines] == [True, True, True, False]
        assert engines[0].keys() == {f"Bearer {KEY}"}
    said = repr(result) + repr(keyed) + caplog.text + "".join(capsys.readouterr())
    assert KEY not in said


def test_the_keys_in_the_answer_of_sglang_are_not_kept() -> None:
    with running(sglang("0.5.20", api_key=KEY, admin_api_key=KEY)) as [engine]:
        result = judged(Target(source=engine.url), window=1)
    assert result.readings
    assert KEY not in repr(result)


@pytest.mark.parametrize(
    "url",
    [f"http://user:{KEY}@h", f"http://{KEY}@h", f"http://h/?token={KEY}", f"http://h/#{KEY}"],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ClaimError) as caught:
        parse_url(url)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("url", ["", "h:1", "ftp://h", "http://", "http://h:0", "http://h:x"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ClaimError):
        parse_url(url)


def test_a_redirect_within_the_origin_is_followed_with_the_key() -> None:
    answers = sglang("0.5.20")
    answers["/moved"] = answers.pop("/server_info")
    answers["/server_info"] = saying(response(b"", 307, {"Location": "/moved"}))
    with running(answers) as [engine]:
        result = judged(Target(source=engine.url, key=Key(KEY)), window=1)
    assert json.dumps([r.engine for r in result.readings]) == '["sglang"]'


def test_a_redirect_never_reaches_another_host() -> None:
    with running(sglang("0.5.20")) as [other]:
        away = saying(response(b"", 302, {"Location": f"{other.url}/server_info"}))
        with running({**sglang("0.5.20"), "/server_info": away}) as [engine]:
            result = judged(Target(source=engine.url, key=Key(KEY)), window=1)
        assert not other.requests
    assert "redirects to another host" in result.unread[0].reason


@pytest.mark.parametrize(("name", "told"), [("compressed", "compressed"), ("endless", "8 MiB")])
def test_what_could_fill_the_memory_is_refused_for_that(name: str, told: str) -> None:
    with running({**sglang("0.5.20"), "/server_info": HOSTILE[name]}) as [engine]:
        result = judged(Target(source=engine.url, kind="sglang"), timeout_s=30.0)
    assert told in result.unread[0].reason


def test_no_waiver_makes_a_pass_of_what_was_not_read() -> None:
    waiver = Waiver(rule="GATE003", until=datetime.date(2999, 1, 1), because="x")
    with running(vllm(), {}) as engines:
        targets = [Target(source=e.url, model="m") for e in engines]
        result = judged(*targets, window=16, waivers=[waiver])
    assert (result.waived(), result.exit_code()) == (1, 3)
