"""The technique of shared prefixes against toys whose caches continue the other's text, by each
part of a key, and against caches that do not."""

import pytest

from probe_runs import done
from probe_toy_gateway import ADAPTER, GatewayToy, Leak, read_picture
from sekisho.probe.budget import Budget
from sekisho.probe.exchange import Answer
from sekisho.probe.model import Verdict
from sekisho.probe.techniques.pictures import data_url, png
from sekisho.probe.techniques.prefix import Prefix

PREFIX = Prefix(documents=3, variant_documents=1, words=60, pictures=1)
TEXTS, ARMS, CUTS, PICTURES = 3, 4 + 3, 3, 2


def test_nothing_is_found_where_nothing_is_shared() -> None:
    found = done(PREFIX, GatewayToy())
    assert found.result.verdict == Verdict.NO_LEAK_SEEN
    assert found.result.findings == ()
    assert found.result.unusable == {}
    assert found.result.not_offered == ()
    assert found.result.clean_trials == (TEXTS + ARMS) * CUTS + PICTURES
    cost = PREFIX.cost()
    assert found.spent.requests <= cost.requests
    assert found.spent.tokens <= cost.tokens


CAUGHT: list[Leak] = ["continues", "continues by salt", "salt is adapter", "pictures by text"]


@pytest.mark.parametrize("leak", CAUGHT)
def test_each_key_that_is_too_weak_is_caught(leak: Leak) -> None:
    found = done(PREFIX, GatewayToy(leak))
    assert found.result.verdict == Verdict.LEAK
    assert found.rules == {"PROBE001"}
    for finding in found.result.findings:
        seen, planted = found.log[finding.seen_in], found.log[finding.planted_in]
        assert (seen.account, planted.account) == ("B", "A")
        fields = seen.ask.fields
        if leak == "continues by salt":
            assert fields["cache_salt"] == planted.ask.fields["cache_salt"]
        elif leak == "salt is adapter":
            assert fields["cache_salt"] == planted.ask.fields["model"] == ADAPTER
        elif leak == "pictures by text":
            assert isinstance(fields["messages"][0]["content"], list)


def test_the_second_account_is_never_given_a_secret() -> None:
    found = done(PREFIX, GatewayToy("continues"))
    canaries = [finding.span for finding in found.result.findings]
    assert canaries
    for finding in found.result.findings:
        seen = found.log[finding.seen_in]
        assert isinstance(seen, Answer)
        assert finding.span is not None
        secret = seen.texts()[finding.span.text][finding.span.start : finding.span.end]
        assert secret in found.log[finding.planted_in].ask.prompt
        assert all(secret not in one.body.decode() for one in found.sent("B"))


def test_prompts_end_before_the_secret_at_many_lengths() -> None:
    found = done(Prefix(documents=5, variant_documents=0, words=100, pictures=0), GatewayToy())
    planted = [one.prompt for one in found.sent("A")]
    asked = [one.prompt for one in found.sent("B")][1:]
    assert len(planted) == 5
    assert len(set(asked)) == len(asked) == 5 * CUTS
    for index, prompt in enumerate(asked):
        assert planted[index // CUTS].startswith(prompt)
    assert all(prompt.split(" ")[-1] == "is" for prompt in asked[::CUTS])
    assert len({len(prompt.split()) % 16 for prompt in asked}) > 5


def test_what_is_refused_is_not_offered_and_no_fault() -> None:
    refuses = frozenset({"cache_salt", "prompt_cache_key", "session_id", "pictures", "completions"})
    found = done(PREFIX, GatewayToy(refuses=refuses))
    assert found.result.verdict == Verdict.NO_LEAK_SEEN
    assert found.result.unusable == {}
    offered = {*found.result.not_offered}
    assert offered == {
        "completions",
        "cache_salt",
        "prompt_cache_key",
        "session_id",
        "pictures",
        f"model {ADAPTER}",
    }
    assert "not offered here: completions, cache_salt" in found.result.sentence()
    assert found.result.clean_trials == (TEXTS + 2) * CUTS  # texts, and an adapter of either
    leaking = done(PREFIX, GatewayToy("continues", refuses=refuses))
    assert leaking.result.verdict == Verdict.LEAK


def test_pictures_that_nobody_looks_at_are_not_offered() -> None:
    found = done(PREFIX, GatewayToy(echoes=False))
    assert found.result.not_offered == ("pictures",)


def test_other_models_are_asked_only_where_they_are_named() -> None:
    found = done(PREFIX, GatewayToy())
    assert {one.fields["model"] for one in found.sent("A")} == {"toy", ADAPTER}
    named = done(Prefix(documents=1, words=20, models=("other",)), GatewayToy())
    assert "other" in {one.fields["model"] for one in named.sent("B")}


def test_a_page_or_a_spent_budget_is_inconclusive() -> None:
    assert done(PREFIX, GatewayToy("page")).result.verdict == Verdict.INCONCLUSIVE
    spent = done(PREFIX, GatewayToy(), budget=Budget(requests_max=3)).result
    assert spent.verdict == Verdict.INCONCLUSIVE
    assert any("budget of 3 requests" in reason for reason in spent.unusable)


def test_a_picture_is_a_png_of_its_digits() -> None:
    text = "0123 4567 8912 3456 7890"
    assert png(text).startswith(b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR")
    assert png(text).endswith(b"IEND\xaeB`\x82")  # with its checksum, as every PNG's
    content = [{"type": "image_url", "image_url": {"url": data_url(text)}}]
    assert read_picture(content) == text
