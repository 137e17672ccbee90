"""The recorded incident that the audit is tested with tells what it is said to tell.

`tests/engines/test_sglang_incident.py` recorded it from SGLang 0.5.19.
"""

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "fixtures" / "sglang-incident"


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


SUMMARY = json.loads((FOLDER / "summary.json").read_text())
REQUESTS = {one["rid"]: one for one in lines("requests.jsonl")}


def test_an_answer_with_status_200_holds_a_code_that_only_another_tenant_sent() -> None:
    [answer] = [
        one
        for one in lines("answers.jsonl")
        if one["rid"] == SUMMARY["answer"] and one["role"] == "decode"
    ]
    assert answer["status"] == 200
    assert SUMMARY["code"] in answer["body"]["text"]
    senders = {rid for rid, one in REQUESTS.items() if SUMMARY["code"] in one["prompt"]}
    assert senders
    assert senders <= set(SUMMARY["tenant_a"])
    assert SUMMARY["answer"] not in senders


def test_prefill_said_one_token_where_decode_said_all() -> None:
    said = {
        one["role"]: one["body"]["meta_info"]["prompt_tokens"]
        for one in lines("answers.jsonl")
        if one["rid"] == SUMMARY["answer"]
    }
    assert said == {"prefill": 1, "decode": len(REQUESTS[SUMMARY["answer"]]["input_ids"])}
    assert SUMMARY["received"] == 1
    assert SUMMARY["reserved"] > 60


def test_no_path_of_a_machine_is_left_in_the_logs() -> None:
    for file in FOLDER.iterdir():
        assert not re.search(r"(?<![\w.<>/:-])/(home|root|tmp|Users|work)/", file.read_text()), file


def test_it_stays_below_a_megabyte() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 1_000_000
