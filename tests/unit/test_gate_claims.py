"""Catalogues, config.json, waivers, the check for `sekisho serve`, and the command's refusals."""

import datetime
import json
from pathlib import Path

import pytest

from gate_kit import judged, rules, running, sglang, vllm
from sekisho.cli import gate as command
from sekisho.gate.claims import config_claim, load_catalogue
from sekisho.gate.model import ClaimError, Rank, Severity
from sekisho.gate.policy import Waiver
from sekisho.gate.run import Target, check, plan_of, read_key
from sekisho.gate.serve_check import check_fleet, refusal
from sekisho.gate.watch import ResultMetrics

KEY = "sk-planted-77aa"
FOREVER = datetime.date(2999, 1, 1)

TOML = """
margin = 1.5
[[models]]
name = "m"
window = 4096
[[models.engines]]
url = "http://h:1"
role = "prefill"
[[waivers]]
rule = "GATE004"
until = 2026-12-31
because = "why"
"""
YAML = """
margin: 1.5
models:
  - name: m
    window: 4096
    engines: [{url: "http://h:1", role: prefill}]
waivers: [{rule: GATE004, until: 2026-12-31, because: why}]
"""


def test_the_three_forms_of_a_catalogue_say_the_same(tmp_path: Path) -> None:
    import yaml

    same = json.dumps(yaml.safe_load(YAML), default=str)
    found = []
    for suffix, text in ((".toml", TOML), (".yaml", YAML), (".json", same)):
        (tmp_path / f"c{suffix}").write_text(text)
        found.append(load_catalogue(tmp_path / f"c{suffix}"))
    assert found[0] == found[1] == found[2]
    assert found[0].waivers[0].until == datetime.date(2026, 12, 31)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("window = 4096", "windw = 4096", "windw"),
        ("window = 4096", 'window = "4096"', "window"),
        ("window = 4096", "window = 4096.5", "window"),
        ("window = 4096", "window = true", "window"),
        ("window = 4096", "window = 0", "window"),
        ("window = 4096", "window = 9\nprompt = 10", "prompt"),
        ("window = 4096", "output = 3", "window"),
        ('role = "prefill"', 'role = "both_"', "both_"),
        ('url = "http://h:1"', "", "url or metrics_file"),
        ('url = "http://h:1"', 'url = "http://u:p@h"', "credentials"),
        ("GATE004", "GATE999", "GATE999"),
        ("GATE004", "GATE003", "GATE003"),
        ('because = "why"', 'because = " "', "because"),
        ("[[models.engines]]", "[[models.engine]]", "engine"),
        ('name = "m"', 'name = ""', "name"),
        ("[[models]]", "[[models", "toml"),
    ],
)
def test_a_catalogue_that_is_wrong_is_refused_and_says_where(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    file = tmp_path / "c.toml"
    assert old in TOML
    file.write_text(TOML.replace(old, new))
    with pytest.raises(ClaimError, match=told):
        plan_of(file, {})


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("c.json", '{"models": [], "models": []}', "models stands twice"),
        ("c.yaml", "models: []\nmodels: []\n", "models stands twice"),
        ("c.yaml", "a: &a [1]\nb: [*a, *a]\n", "aliases"),
        ("c.yaml", "1: 2\n", "no text"),
        ("c.yaml", "models: !!python/object/apply:os.getcwd []\n", "not yaml in line 1"),
        ("c.yaml", "- {", "not yaml"),
        ("c.json", "[" * 100_000, "not json"),
        ("c.txt", "", "want a catalogue named"),
    ],
)
def test_tricks_in_a_catalogue_are_refused(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ClaimError, match=told):
        load_catalogue(tmp_path / name)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": 8192, "rope_scaling": None}, 8192),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}},
            16384,
        ),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "original_max_position_embeddings": 4096,
                },
            },
            163840,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        ({"text_config": {"max_position_embeddings": 1000}}, 1000),
        ({"max_position_embeddings": 5, "rope_parameters": {"rope_type": "default"}}, 5),
    ],
)
def test_the_window_of_a_config(tmp_path: Path, config: dict[str, object], window: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert config_claim("m", tmp_path).window == window


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"max_position_embeddings": "1"}'])
def test_a_config_without_a_window_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ClaimError):
        config_claim("m", tmp_path)


def test_a_catalogue_is_judged_with_the_claim_of_its_gateway(tmp_path: Path) -> None:
    listed = {"data": [{"id": "m", "max_model_len": 2048}, {"id": "n", "max_model_len": 9}]}
    gateway = {"/v1/models": json.dumps(listed).encode()}
    with running(vllm(), gateway) as [engine, front]:
        file = tmp_path / "c.toml"
        file.write_text(
            f'[[models]]\nname = "m"\nwindow = 1024\ngateway = {{url = "{front.url}", '
            f'key_env = "K"}}\n[[models.engines]]\nurl = "{engine.url}"\n'
        )
        result = check(plan_of(file, {"K": KEY}))
        assert (front.keys(), engine.keys()) == ({f"Bearer {KEY}"}, set())
    assert result.advertised == {"m": 2048}
    assert "GATE006" in rules(result)
    assert result.exit_code() == 0
    assert KEY not in repr(result)


@pytest.mark.parametrize("value", ["", f"{KEY}\r\nX: y", f"{KEY}é"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(value: str) -> None:
    with pytest.raises(ClaimError) as caught:
        read_key("K", "", {"K": value}, Path())
    assert KEY not in str(caught.value)


def test_a_stated_prompt_settles_a_prompt_limit_and_nothing_else() -> None:
    with running(sglang("0.5.20")) as [engine]:
        target = Target(source=engine.url)
        assert "GATE001" in rules(judged(target, window=4096))
        assert "GATE001" not in rules(judged(target)), "its own context is not all prompt"
        from sekisho.gate.model import Claim
        from sekisho.gate.run import Plan

        def with_prompt(window: int) -> set[str]:
            claim = Claim(model="", window=window, source="x", prompt_max=4090)
            return rules(check(Plan(targets=[target], everywhere=[claim])))

        assert "GATE001" not in with_prompt(4096)
        assert "GATE001" in with_prompt(4097)


def test_output_is_held_by_decode_on_top_of_the_window() -> None:
    from sekisho.gate.model import Claim
    from sekisho.gate.run import Plan

    with running(vllm()) as [engine]:
        for output, holds in ((0, True), (1, False)):
            claim = Claim(model="", window=2048, output_tokens=output, source="x")
            result = check(Plan(targets=[Target(source=engine.url)], everywhere=[claim]))
            assert ("GATE001" not in rules(result)) is holds


def test_margin_warns_or_fails() -> None:
    with running(vllm()) as [engine]:
        target = Target(source=engine.url)
        warned = judged(target, margin=30.0)
        failed = judged(target, margin=30.0, margin_is_required=True)
        assert "GATE004" not in rules(judged(target, margin=22.0))
    assert ("GATE004" in rules(warned), warned.exit_code()) == (True, 0)
    assert ("GATE004" in rules(failed), failed.exit_code()) == (True, 1)


def test_a_waiver_covers_until_its_day_and_then_counts_itself() -> None:
    def run(*waivers: Waiver) -> tuple[int, set[str], int]:
        with running(sglang("0.5.20")) as [engine]:
            result = judged(Target(source=engine.url), window=4096, waivers=waivers)
        return result.exit_code(), rules(result), result.waived()

    good = Waiver(rule="GATE001", until=FOREVER, because="prompts end at 4,090")
    old = Waiver(rule="GATE001", until=datetime.date(2020, 1, 1), because="x")
    other = Waiver(rule="GATE001", until=FOREVER, because="x", model="another")
    assert run()[0] == 1
    code, broken, waived = run(good)
    assert (code, "GATE001" in broken, waived) == (0, False, 1)
    code, broken, waived = run(old)
    assert (code, broken >= {"GATE001", "GATE009"}, waived) == (1, True, 0)
    code, broken, _ = run(other)
    assert (code, broken >= {"GATE001", "GATE010"}) == (1, True)


def test_a_version_that_is_not_stated_is_inconclusive_in_a_pair() -> None:
    with running(sglang("0.5.19-prefill", version=""), sglang("0.5.23-decode")) as [p, d]:
        result = judged(Target(source=p.url), Target(source=d.url), window=16)
    found = [f for f in result.findings if f.rule == "GATE007" and f.source == p.url]
    assert [f.severity for f in found] == [Severity.INCONCLUSIVE]


def test_serve_refuses_a_window_that_a_node_cannot_hold() -> None:
    def fleet(**held: int) -> dict[str, Rank]:
        return {
            f"{role}-1": Rank(name="", pool_tokens=pool, page_size=16, sequence_max=8192)
            for role, pool in held.items()
        }

    pair = fleet(prefill=1024, decode=16384)
    assert refusal(check_fleet("m", 1024, pair)) == ""
    said = refusal(check_fleet("m", 1025, pair))
    assert "prefill-1: prefill holds 1024 tokens, 1025 are advertised" in said
    assert "the pool of 1024, in pages of 16" in said
    assert "decode-1" not in said
    assert "no decode engine" in refusal(check_fleet("m", 1, fleet(prefill=1024)))
    assert "the limit of a sequence" in refusal(check_fleet("m", 8193, fleet(colocated=16384)))
    assert refusal(check_fleet("m", 1, {}))


def test_metrics_say_what_the_result_says_and_nothing_before_it() -> None:
    metrics = ResultMetrics()
    assert not list(metrics.collect())
    with running(sglang("0.5.19-prefill"), sglang("0.5.19-decode")) as engines:
        metrics.result = judged(*(Target(source=e.url) for e in engines))
    found = {(s.name, *s.labels.values()): s.value for m in metrics.collect() for s in m.samples}
    assert found["sekisho_gate_holds",] == 0
    assert found["sekisho_gate_servable_tokens", "/models/smollm2", "prefill"] == 1018
    assert found["sekisho_gate_advertised_tokens", "/models/smollm2"] == 4096


def run_command(*arguments: str) -> int:
    code = command.app(args=list(arguments), standalone_mode=False)
    return code if isinstance(code, int) else 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["absent.toml"],
        ["--vllm", f"http://u:{KEY}@h"],
        ["--vllm", "http://h", "--key-env", KEY],
        ["--vllm", "http://h", "--key-env", "http://h=NO_SUCH_VARIABLE_HERE"],
        ["--vllm", "http://h", "--key-env", "http://other=HOME"],
        ["--vllm", "http://h", "--prompt", "3"],
        ["--vllm", "http://h", "--watch-port", "9"],
        ["--vllm", "http://h", "--config", "absent"],
    ],
)
def test_the_command_that_cannot_run_exits_2_with_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("sekisho: ")
    assert said.err.count("\n") == 1
    assert KEY not in said.err + said.out
