"""Configuration: precedence, refusals in one line that names key and limit, nothing leaked."""

import itertools
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sekisho.cli import main
from sekisho.config import ConfigError, Settings, load_settings, mask_password

HOME = {"HOME": "/home-of-nobody"}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither a sekisho.toml nor a SEKISHO_ variable of the machine reaches a test."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SEKISHO_")]:
        monkeypatch.delenv(name)
    return tmp_path


def refusal(
    flags: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
    toml: str | None = None,
) -> str:
    """The message of the refusal; it must be one printable line."""
    file = None
    if toml is not None:
        file = Path("given.toml")
        file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load_settings(flags or {}, HOME | (environ or {}), file)
    message = str(caught.value)
    assert message.isprintable()
    return message


@pytest.mark.parametrize("places", list(itertools.product([False, True], repeat=3)))
def test_flags_beat_environment_beats_file_beats_default(places: tuple[bool, bool, bool]) -> None:
    in_flag, in_environment, in_file = places
    file = Path("given.toml")
    file.write_text("port = 1001\n" if in_file else "")
    flags: dict[str, object] = {"port": "1003"} if in_flag else {}
    environ = HOME | ({"SEKISHO_PORT": "1002"} if in_environment else {})
    settings = load_settings(flags, environ, file)
    expected = (
        (1003, "flag")
        if in_flag
        else (1002, "environment")
        if in_environment
        else (1001, "file")
        if in_file
        else (8000, "default")
    )
    assert settings.port == expected[0]
    assert settings.resolved()["port"] == expected


def test_each_setting_can_come_from_each_place() -> None:
    values = {name: entry.value for name, entry in load_settings({}, HOME, None).resolved().items()}
    file = Path("all.toml")
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    environ = {f"SEKISHO_{name.upper()}": str(value) for name, value in values.items()}
    for source, settings in {
        "flag": load_settings(values, HOME, None),
        "environment": load_settings({}, environ, None),
        "file": load_settings({}, HOME, file),
    }.items():
        shown = settings.resolved()
        assert list(shown) == list(Settings.model_fields)
        assert {name: entry.value for name, entry in shown.items()} == values
        assert {entry.source for entry in shown.values()} == {source}


def test_the_file_of_the_current_folder_is_read_only_if_none_is_given() -> None:
    Path("sekisho.toml").write_text("port = 1001\n")
    Path("other.toml").write_text("")
    assert load_settings({}, HOME, None).port == 1001
    assert load_settings({}, HOME, Path("other.toml")).port == 8000


@pytest.mark.parametrize(
    ("given", "named", "nearest"),
    [
        ({"flags": {"prefil": 2}}, "--prefil:", "--prefill"),
        ({"environ": {"SEKISHO_PREFIL": "2"}}, "SEKISHO_PREFIL:", "SEKISHO_PREFILL"),
        ({"environ": {"sekisho_port": "2"}}, "sekisho_port:", "SEKISHO_PORT"),
        ({"environ": {"SEKISHO_": "2"}}, "SEKISHO_:", "SEKISHO_"),
        ({"toml": "isolaton = 'strict'"}, "isolaton in given.toml:", "isolation"),
        ({"toml": "max-batch = 3"}, "max-batch in given.toml:", "max_batch"),
        ({"toml": "[serve]\nport = 1"}, "serve in given.toml:", ""),
        ({"toml": '"a\\nb" = 1'}, "a b in given.toml:", ""),
    ],
)
def test_an_unknown_key_refuses_and_names_the_nearest(
    given: dict[str, object], named: str, nearest: str
) -> None:
    message = refusal(**given)  # type: ignore[arg-type]
    assert message.startswith(f"{named} unknown key; the nearest known one is {nearest}")


def test_a_variable_of_another_program_is_no_key() -> None:
    load_settings({}, HOME | {"SEKISHOU": "1", "MY_SEKISHO_X": "1"}, None)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("prefill", "-1", "0 to 64"),
        ("prefill", "65", "0 to 64"),
        ("decode", "two", "0 to 64"),
        ("colocated", "1.5", "0 to 64"),
        ("port", "65536", "0 to 65535"),
        ("port", "", "0 to 65535"),
        ("port", "nan", "0 to 65535"),
        ("page_size", "0", "a multiple of 16 from 16 to 1024"),
        ("page_size", "24", "a multiple of 16 from 16 to 1024"),
        ("page_size", "1040", "a multiple of 16 from 16 to 1024"),
        ("pool_tokens", "0", "at least one page, or auto"),
        ("pool_tokens", "-16", "at least one page, or auto"),
        ("pool_tokens", "much", "at least one page, or auto"),
        ("window", "1", "at least 2, or auto"),
        ("window", "1M", "at least 2, or auto"),
        ("window", "", "at least 2, or auto"),
        ("max_batch", "0", "1 to 1024"),
        ("chunk_tokens", "0", "1 to 65536"),
        ("queue_max", "-1", "0 to 65536"),
        ("threads", "0", "1 to 1024, or auto"),
        ("threads", "1025", "1 to 1024, or auto"),
        ("dtype", "float16", "bfloat16 or float32"),
        ("device", "tpu", "cpu or cuda"),
        ("isolation", "STRICT", "strict, standard or off"),
        ("transport", "nixl", "mooncake or memory"),
        ("mooncake_protocol", "ib", "tcp or rdma"),
        ("log_level", "trace", "debug, info, warning or error"),
        ("model", "", "a Hugging Face folder"),
        ("host", "", "the address"),
        ("state_dir", "", "the folder"),
    ],
)
def test_a_value_outside_its_limit_names_key_limit_and_value(
    name: str, value: str, limit: str
) -> None:
    variable = f"SEKISHO_{name.upper()}"
    message = refusal(environ={variable: value})
    assert message.startswith(f"{variable}: want ")
    assert limit in message
    assert message.endswith(f"; got {value!r}")
    flag = f"--{name.replace('_', '-')}: want "
    assert refusal(flags={name: value}).startswith(flag)


@pytest.mark.parametrize("value", ["true", "1.0", "[1]", "{ a = 1 }", "1979-05-27"])
def test_toml_values_of_another_type_are_refused(value: str) -> None:
    message = refusal(toml=f"decode = {value}")
    assert message.startswith("decode in given.toml: want the number of decode nodes, 0 to 64; got")


def test_a_long_value_is_cut() -> None:
    assert len(refusal(flags={"dtype": "x" * 5000})) < 200


def test_an_unreadable_file_is_one_line() -> None:
    Path("broken.toml").write_text("port = \n")
    Path("latin.toml").write_bytes(b'host = "\xe9"\n')
    for name, words in {
        "absent.toml": "No such file",
        ".": "Is a directory",
        "broken.toml": "not TOML",
        "latin.toml": "not UTF-8",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_settings({}, HOME, Path(name))
        assert str(caught.value).startswith(f"{name}: {words}")
        assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"prefill": 0}, "prefill = 0 and decode = 1: each must be at least 1"),
        ({"decode": 0}, "prefill = 1 and decode = 0: each must be at least 1"),
        ({"colocated": 1, "prefill": 1}, "colocated = 1 excludes prefill = 1"),
        ({"colocated": 1, "decode": 2}, "colocated = 1 excludes prefill = 0 and decode = 2"),
        ({"colocated": 1, "transport": "memory"}, "have no use with colocated"),
        ({"mooncake_protocol": "rdma"}, 'needs transport = "mooncake"'),
        ({"mooncake_protocol": "rdma", "transport": "memory"}, 'needs transport = "mooncake"'),
        ({"mooncake_device": "mlx5_0"}, 'needs mooncake_protocol = "rdma"'),
        ({"device": "cuda"}, "needs colocated nodes"),
        ({"pool_tokens": 32, "page_size": 64}, "below one page of 64 tokens"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    flags: dict[str, object], words: str
) -> None:
    assert words in refusal(flags=flags)


@pytest.mark.parametrize(
    ("flags", "nodes"),
    [
        ({}, (0, 1, 1)),
        ({"prefill": 2, "decode": 3}, (0, 2, 3)),
        ({"colocated": 2}, (2, 0, 0)),
        ({"colocated": "1", "prefill": "0"}, (1, 0, 0)),
        ({"colocated": 1, "device": "cuda"}, (1, 0, 0)),
        ({"transport": "mooncake", "mooncake_protocol": "rdma"}, (0, 1, 1)),
    ],
)
def test_settings_that_agree(flags: dict[str, object], nodes: tuple[int, int, int]) -> None:
    settings = load_settings(flags, HOME, None)
    assert (settings.colocated, settings.prefill, settings.decode) == nodes


def test_defaults_that_follow_from_other_settings() -> None:
    settings = load_settings({"model": "models/Qwen3-0.6B/", "state_dir": "state"}, HOME, None)
    assert settings.served_model_name == "Qwen3-0.6B"
    assert settings.state_dir == Path.cwd() / "state"
    assert settings.database == f"sqlite:///{Path.cwd()}/state/sekisho.db"
    assert load_settings({"model": "."}, HOME, None).served_model_name == Path.cwd().name


@pytest.mark.parametrize(
    ("xdg", "folder"),
    [
        ({}, "/home-of-nobody/.local/state/sekisho"),
        ({"XDG_STATE_HOME": "/var/lib"}, "/var/lib/sekisho"),
        ({"XDG_STATE_HOME": "relative"}, "/home-of-nobody/.local/state/sekisho"),
    ],
)
def test_the_state_folder_follows_the_xdg_specification(xdg: dict[str, str], folder: str) -> None:
    assert load_settings({}, HOME | xdg, None).state_dir == Path(folder)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("sqlite:////var/x.db", "sqlite:////var/x.db"),
        ("postgresql://u:pa@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:p@s/s:@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u@h/db", "postgresql://u@h/db"),
        ("postgresql://:pa@h/db", "postgresql://:***@h/db"),
        ("postgresql://h/db?a=1&password=pa&b=2", "postgresql://h/db?a=1&password=***&b=2"),
        ("postgresql://h/db?sslpassword=pa", "postgresql://h/db?sslpassword=***"),
    ],
)
def test_a_password_in_a_url_is_masked(url: str, masked: str) -> None:
    assert mask_password(url) == masked
    settings = load_settings({"database": url}, HOME, None)
    assert settings.database == url
    assert settings.resolved()["database"].value == masked
    assert "pa@h" not in repr(settings)


def test_a_malformed_database_url_is_not_repeated() -> None:
    message = refusal(environ={"SEKISHO_DATABASE": "postgresql:u:hunter2@h"})
    assert message.startswith("SEKISHO_DATABASE: want a database URL")
    assert "hunter2" not in message


def test_settings_do_not_change_after_the_check() -> None:
    settings = load_settings({}, HOME, None)
    with pytest.raises(ValueError, match="frozen"):
        settings.isolation = "off"


def test_config_show_prints_toml_with_the_source_of_each_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEKISHO_DATABASE", "postgresql://u:hunter2@h/db")
    Path("mine.toml").write_text('served_model_name = "関所"\n')
    assert main(["config", "show", "--file", "mine.toml", "--prefill", "2"]) == 0
    text = capsys.readouterr().out
    table = tomllib.loads(text)
    assert list(table) == list(Settings.model_fields)
    assert table["served_model_name"] == "関所"
    assert table["database"] == "postgresql://u:***@h/db"
    sources = {line.split(" = ")[0]: line.rsplit("# ", 1)[1] for line in text.splitlines()}
    assert sources["prefill"] == "flag"
    assert sources["database"] == "environment"
    assert sources["served_model_name"] == "file"
    assert sources["decode"] == "default"


def test_config_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--json", "--colocated", "2"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["colocated"] == {"value": 2, "source": "flag"}
    assert shown["prefill"] == {"value": 0, "source": "default"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing command"),
        (["config", "show", "--prefil", "2"], "--prefill"),
        (["config", "show", "--port", "x"], "--port: want"),
        (["config", "show", "--file", "absent.toml"], "absent.toml: No such file"),
        (["config", "show", "--device", "cuda"], "needs colocated nodes"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith("sekisho: ")
    assert err.count("\n") == 1


def test_the_command_line_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from sekisho.cli import main; rc = main(['config', 'show']);"
        "heavy = {'torch', 'transformers', 'sqlalchemy', 'uvicorn'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else rc)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
