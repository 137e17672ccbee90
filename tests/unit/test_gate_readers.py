"""Each reader against answers of real engines, over a real local server."""

import json
from typing import Any, cast

import pytest

from gate_kit import FIXTURES, Answers, Speak, judged, rules, running, sglang, vllm
from sekisho.gate.model import Reading, Severity
from sekisho.gate.run import Target


def only(answers: Answers, **target: Any) -> Reading:
    with running(answers) as [engine]:
        result = judged(Target(source=engine.url, **target))
    assert not result.unread, result.unread
    return result.readings[0]


def test_the_inverted_pair_of_the_samples_names_prefill_with_1018_against_4096() -> None:
    with running(sglang("0.5.19-prefill"), sglang("0.5.19-decode")) as [prefill, decode]:
        result = judged(Target(source=prefill.url), Target(source=decode.url))
    assert result.exit_code() == 1
    found = [f for f in result.findings if f.rule == "GATE001" and f.source == prefill.url]
    assert [(f.observed, f.required) for f in found] == [(1018, 4096)]
    assert "prefill holds 1018 tokens, 4096 are advertised" in found[0].message
    assert result.servable == {"/models/smollm2": 1018}
    assert {c.role: c.servable for c in result.capacities} == {"prefill": 1018, "decode": 4096}


def stock(**changed: object) -> list[Answers]:
    """A pair of SGLang 0.5.23 with --context-length 4096, which takes prompts of 4,090."""
    sizes = {"max_total_num_tokens": 8192, "max_req_input_len": 4090, **changed}
    pair = [sglang(f"0.5.23-{role}", **sizes) for role in ("prefill", "decode")]
    for answers in pair:
        info = json.loads(cast(bytes, answers["/server_info"]))
        for state in info["internal_states"]:
            state["memory_usage"]["token_capacity"] = sizes["max_total_num_tokens"]
        load = {"dp_rank": 0, "max_total_num_tokens": sizes["max_total_num_tokens"]}
        answers["/server_info"] = json.dumps(info).encode()
        answers["/v1/loads"] = json.dumps({"loads": [load]}).encode()
    return list(pair)


@pytest.mark.parametrize(
    ("window", "changed", "code", "servable"),
    [
        (None, {}, 0, 4096),
        (None, {"max_req_input_len": 4089}, 1, 4089),
        (None, {"max_total_num_tokens": 4095, "max_req_input_len": 4089}, 1, 3568),
        (None, {"max_total_num_tokens": 4096 + 512}, 0, 4096),
        (None, {"max_total_num_tokens": 4096 + 511}, 1, 4080),
        (4090, {}, 0, 4096),
        (4096, {}, 1, 4090),
    ],
)
def test_the_context_of_a_stock_sglang_is_prompt_and_answer_unless_somebody_advertises_it(
    window: int | None, changed: dict[str, object], code: int, servable: int
) -> None:
    with running(*stock(**changed)) as pair:
        result = judged(*(Target(source=e.url) for e in pair), window=window)
    assert (result.exit_code(), list(result.servable.values())) == (code, [servable])
    assert ("GATE001" in rules(result)) is bool(code)


def test_the_faulty_version_of_the_samples_cites_its_report() -> None:
    with running(sglang("0.5.19-prefill"), sglang("0.5.23-decode")) as [old, new]:
        result = judged(Target(source=old.url), Target(source=new.url))
    about = {f.source: (f.severity, f.report) for f in result.findings if f.rule == "GATE007"}
    assert about == {
        old.url: (Severity.ERROR, "sglang#30233"),
        new.url: (Severity.WARNING, "sglang#28651"),
    }


def test_sglang_decode_keeps_its_reserve() -> None:
    rank = only(sglang("0.5.23-decode")).ranks[0]
    assert (rank.pool_tokens, rank.reserved_tokens, rank.request_max) == (2048, 512, 2042)


def test_an_older_sglang_answers_at_the_older_path() -> None:
    answers = sglang("0.5.20")
    answers["/get_server_info"] = answers.pop("/server_info")
    del answers["/v1/loads"]
    reading = only(answers)
    assert (reading.version, reading.role, reading.ranks[0].pool_tokens) == ("0.5.20", "both", 4096)


def test_the_smaller_of_two_pools_that_sglang_states_is_believed() -> None:
    reading = only(sglang("0.5.20", max_total_num_tokens=9_000_000))
    assert reading.ranks[0].pool_tokens == 4096


def test_every_rank_of_sglang_must_answer() -> None:
    with running(sglang("0.5.20", dp_size=2)) as [engine]:
        result = judged(Target(source=engine.url), window=100)
    assert "1 of dp_size 2 ranks answered" in result.unread[0].reason
    assert result.exit_code() == 3


def test_the_smallest_rank_of_sglang_decides() -> None:
    answers = sglang("0.5.20")
    info = json.loads((FIXTURES / "sglang-0.5.20" / "server_info.json").read_text())
    info["dp_size"] = 2
    info["internal_states"] = [info["internal_states"][0]] * 2
    answers["/server_info"] = json.dumps(info).encode()
    loads = [{"dp_rank": n, "max_total_num_tokens": size} for n, size in enumerate((4096, 640))]
    answers["/v1/loads"] = json.dumps({"loads": loads}).encode()
    with running(answers) as [engine]:
        result = judged(Target(source=engine.url), window=1000)
    assert (result.capacities[0].rank, result.capacities[0].servable) == ("dp1", 640)
    assert result.exit_code() == 1


def test_vllm_pool_is_blocks_less_the_null_block() -> None:
    reading = only(vllm())
    rank = reading.ranks[0]
    assert (reading.engine, reading.version, reading.advertised) == ("vllm", "0.32.0", 2048)
    assert (rank.pool_tokens, rank.page_size, rank.reserved_tokens) == (46592, 128, 128)


def test_vllm_that_fits_holds() -> None:
    with running(vllm()) as [engine]:
        assert judged(Target(source=engine.url)).exit_code() == 0


def test_a_vllm_engine_without_its_pool_is_not_judged_by_the_others() -> None:
    answers = vllm()
    text = answers["/metrics"]
    assert isinstance(text, bytes)
    more = b'vllm:num_requests_running{engine="1",model_name="/models/smollm2"} 0.0\n'
    answers["/metrics"] = text + more
    with running(answers) as [engine]:
        result = judged(Target(source=engine.url))
    assert "no pool for engine 1" in result.unread[0].reason
    assert result.exit_code() == 3


def test_a_vllm_pair_from_saved_metrics_is_judged_by_named_roles() -> None:
    base = FIXTURES / "vllm-0.32"
    pair = [
        Target(source=str(base / f"metrics_{role}_mooncake.txt"), what="file", role=role)
        for role in ("prefill", "decode")
    ]
    held = 1456 * 32 - 32
    result = judged(*pair, window=held)
    assert result.servable == {"/models/smollm2": held}
    assert "GATE001" not in rules(result)
    assert "GATE001" in rules(judged(*pair, window=held + 1))
    assert "GATE002" in rules(judged(pair[0], window=100))


@pytest.mark.parametrize(("role", "held"), [("prefill", 1018), ("decode", 4090)])
def test_saved_metrics_of_sglang_say_what_the_engine_says(role: str, held: int) -> None:
    file = FIXTURES / f"sglang-0.5.19-{role}" / "metrics.txt"
    result = judged(Target(source=str(file), what="file"), window=4096)
    assert [(c.role, c.servable) for c in result.capacities] == [(role, held)]


def test_llama_cpp_gives_a_request_one_slot() -> None:
    props = {
        "default_generation_settings": {"n_ctx": 1024},
        "total_slots": 2,
        "model_path": "models/a.gguf",
        "build_info": "b1-abc",
    }
    slots = [{"id": n, "n_ctx": 1024} for n in range(2)]
    listed = {"data": [{"id": "a.gguf", "owned_by": "llamacpp", "meta": {"n_ctx_train": 8192}}]}
    answers = {
        "/props": json.dumps(props).encode(),
        "/slots": json.dumps(slots).encode(),
        "/v1/models": json.dumps(listed).encode(),
    }
    with running(answers) as [engine]:
        result = judged(Target(source=engine.url), window=2048)
    assert (result.servable, result.exit_code()) == ({"a.gguf": 1024}, 1)
    assert result.readings[0].engine == "llama.cpp"


def test_tgi_is_told_by_its_info() -> None:
    info = {
        "model_id": "m",
        "version": "3.3.0",
        "max_total_tokens": 4096,
        "max_input_tokens": 4095,
        "max_batch_total_tokens": 3000,
    }
    with running({"/info": json.dumps(info).encode()}) as [engine]:
        result = judged(Target(source=engine.url))
    assert (result.readings[0].engine, result.servable) == ("tgi", {"m": 3000})
    assert result.exit_code() == 1


def test_sekisho_states_what_its_smallest_node_holds() -> None:
    listed = {"data": [{"id": "m", "owned_by": "sekisho", "max_model_len": 8192}]}
    answers = {"/health/readiness": b"{}", "/v1/models": json.dumps(listed).encode()}
    reading = only(answers)
    assert (reading.prefix_scope, reading.ranks[0].pool_tokens) == ("tenant", 8192)


def sekisho(**changed: object) -> dict[str, bytes | Speak]:
    """A pair that promises 1,024 tokens; its nodes have pages of 16."""
    pools = {"prefill": 1024, "decode": 4096}
    nodes = [
        {
            "name": f"{role}-0.1",
            "role": role,
            "pool_tokens": size,
            "page_size": 16,
            "pages": size // 16,
            "tokens_max": size,
        }
        for role, size in pools.items()
    ]
    base = {"model": "m", "ready": True, "window": 1024, "missing": [], "nodes": nodes}
    return {"/health/capacity": json.dumps({**base, **changed}).encode()}


@pytest.mark.parametrize(
    ("window", "changed", "code"),
    [
        (1024, {}, 0),
        (1025, {}, 1),
        (16, {"window": None}, 0),
        (16, {"window": 1025}, 1),
        (16, {"window": 1025, "ready": False}, 1),
        (16, {"ready": False}, 3),
        (16, {"missing": ["prefill"]}, 3),
        (16, {"nodes": []}, 3),
        (16, {"nodes": None}, 3),
        (16, {"window": 0}, 3),
    ],
)
def test_sekisho_is_read_pool_by_pool_without_a_key(
    window: int, changed: dict[str, object], code: int
) -> None:
    with running(sekisho(**changed)) as [engine]:
        result = judged(Target(source=engine.url, kind="sekisho"), window=window)
    assert result.exit_code() == code
    assert {path for path, _ in engine.requests} == {"/health/capacity"}
    if result.readings:
        held = [(c.role, c.servable, c.source, c.rank) for c in result.capacities]
        assert held == [
            ("prefill", 1024, f"{engine.url}#prefill", "prefill-0.1"),
            ("decode", 4096, f"{engine.url}#decode", "decode-0.1"),
        ]
        short = [f.source for f in result.findings if f.rule == "GATE001"]
        assert short == ([f"{engine.url}#prefill"] if code else [])
        assert "GATE005" not in rules(result), "its gateway refuses in front of both"


@pytest.mark.parametrize("name", ["pool_tokens", "page_size", "tokens_max"])
@pytest.mark.parametrize("lie", [0, -1, 2**60, "16", None])
def test_a_size_of_sekisho_that_is_none_is_not_believed(name: str, lie: object) -> None:
    told = json.loads(cast(bytes, sekisho()["/health/capacity"]))
    told["nodes"][1][name] = lie
    with running({"/health/capacity": json.dumps(told).encode()}) as [engine]:
        result = judged(Target(source=engine.url, kind="sekisho"), window=16)
    assert (result.readings, result.exit_code()) == ([], 3)


def test_one_address_for_both_roles_may_be_named_so_and_no_other_way() -> None:
    with running(sekisho()) as [engine]:
        both, prefill = (
            judged(Target(source=engine.url, kind="sekisho", role=role), window=16)
            for role in ("both", "prefill")
        )
    assert "GATE012" not in rules(both)
    assert "GATE012" in rules(prefill)


def test_a_role_other_than_the_named_one_is_a_finding() -> None:
    with running(sglang("0.5.19-prefill")) as [engine]:
        result = judged(Target(source=engine.url, role="decode"), window=100)
    assert "GATE012" in rules(result)


def test_the_smallest_replica_speaks_for_its_role_in_any_order() -> None:
    small = json.loads((FIXTURES / "sglang-0.5.20" / "server_info.json").read_text())
    small["max_total_num_tokens"] = 320
    less = {**sglang("0.5.20"), "/server_info": json.dumps(small).encode()}
    with running(sglang("0.5.20"), less) as two:
        for order in (two, two[::-1]):
            result = judged(*(Target(source=e.url) for e in order), window=300)
            assert [(c.servable, c.source) for c in result.capacities] == [(320, two[1].url)]
