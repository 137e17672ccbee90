"""``sekisho gate plan`` against published sizes and the formulae of the engines.

The fixture has the sizes out of the models' public ``config.json`` files, as numbers alone.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sekisho.cli.gate_plan import plan as command
from sekisho.gate.model import ClaimError
from sekisho.gate.plan import load_config, parse_bytes, plan_pool
from sekisho.gate.plan_families import FAMILIES, kv_shape

FILE = Path(__file__).parents[1] / "fixtures" / "gate" / "plan_configs.json"
CONFIGS: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
APP = typer.Typer()
APP.command()(command)


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(CONFIGS[name]), **changes}


@pytest.mark.parametrize(
    ("name", "kilobytes"),
    [("DeepSeek-V3", 70.272), ("Qwen2.5-72B-Instruct", 327.680), ("Llama-3.1-405B", 516.096)],
)
def test_bytes_of_a_token_as_published(name: str, kilobytes: float) -> None:
    """Table 1 of "Insights into DeepSeek-V3" (arXiv 2505.09343), KV cache per token in BF16."""
    assert kv_shape(config(name), 1).bytes_per_token == round(kilobytes * 1000)


@pytest.mark.parametrize(
    ("name", "ranks", "dtype", "expected"),
    [
        ("GLM-4.5", 1, "auto", 92 * 2 * 8 * 128 * 2),
        ("GLM-4.5-Air", 8, "auto", 46 * 2 * 1 * 128 * 2),
        ("GLM-4.5-Air", 16, "auto", 46 * 2 * 1 * 128 * 2),
        ("GLM-4-9B-0414", 4, "fp8", 40 * 2 * 1 * 128),
        ("GLM-5", 8, "auto", 78 * (1152 + 132)),
        ("GLM-5", 8, "fp8", 78 * (656 + 132)),
        ("DeepSeek-V3", 16, "fp8", 61 * 576),
        ("DeepSeek-V2-Lite", 1, "auto", 27 * 1152),
        ("Qwen3-8B", 2, "auto", 36 * 2 * 4 * 128 * 2),
        ("Qwen3-30B-A3B", 1, "auto", 48 * 2 * 4 * 128 * 2),
        ("Llama-3.1-8B", 1, "auto", 32 * 2 * 8 * 128 * 2),
        ("Mistral-7B-v0.1", 1, "auto", 32 * 2 * 8 * 128 * 2),
    ],
)
def test_bytes_of_a_token_by_the_formula(name: str, ranks: int, dtype: str, expected: int) -> None:
    assert kv_shape(config(name), ranks, dtype).bytes_per_token == expected


def test_what_is_counted_conservatively_is_said() -> None:
    assert "sliding" in " ".join(kv_shape(config("Mistral-7B-v0.1"), 1).notes)
    assert not kv_shape(config("Qwen2.5-72B-Instruct"), 1).notes
    assert "each keeps all" in " ".join(kv_shape(config("DeepSeek-V3"), 8).notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, "model_type: 'mamba'"),
        ({"model_type": None}, "model_type"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 7}, "num_key_value_heads: 7 does not divide"),
        ({"hidden_size": 4097}, "head_dim"),
        ({"head_dim": 1.5}, "head_dim"),
        ({"torch_dtype": None}, "torch_dtype"),
        ({"torch_dtype": "int3"}, "torch_dtype: 'int3'"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ClaimError, match=said):
        kv_shape(config("Llama-3.1-8B", **changes), 1)


@pytest.mark.parametrize("field", ["kv_lora_rank", "qk_rope_head_dim", "index_head_dim"])
def test_a_latent_without_its_sizes_is_refused(field: str) -> None:
    with pytest.raises(ClaimError, match=field):
        kv_shape(config("GLM-5", **{field: None}), 1)


def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    with pytest.raises(ClaimError, match="num_key_value_heads: 8 of 32 heads on 3 ranks"):
        kv_shape(config("Llama-3.1-8B"), 3)


def test_families_are_all_tried() -> None:
    for family in FAMILIES:
        fields = {**config("GLM-5"), "model_type": family}
        assert kv_shape(fields, 1).bytes_per_token > 0


@given(st.integers(1, 2**44), st.integers(1, 2**44), st.integers(0, 2**40), st.integers(1, 4096))
def test_the_window_is_in_both_pools_and_is_the_largest(
    memory: int, decode_memory: int, weights: int, page_size: int
) -> None:
    fields = config("Llama-3.1-8B")
    page_bytes = 131072 * page_size
    least = min(memory, decode_memory) - weights
    try:
        found = plan_pool(
            fields, 2**60, memory=memory, decode_memory=decode_memory, weights=weights,
            page_size=page_size,
        )  # fmt: skip
    except ClaimError:
        assert least < 2 * page_bytes
        return
    assert found.window % page_size == 0
    pages = found.window // page_size
    assert (pages + 1) * page_bytes <= least < (pages + 2) * page_bytes
    assert found.comfortable * 2 <= found.window


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("1.5 TB", 1500 * 10**9), ("512MiB", 2**29), ("7", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "80gib", "-1GiB", "1e9", "٣GiB", "1.2.3GB", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ClaimError, match="--memory"):
        parse_bytes(text, "--memory")


def test_the_command_says_the_window(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["DeepSeek-V3"]))
    ran = CliRunner().invoke(APP, [str(tmp_path), "--memory", "20GiB", "--weights", "12GiB"])
    assert ran.exit_code == 0
    pages = 8 * 2**30 // (70272 * 16) - 1
    assert f"window      {pages * 16:,} tokens" in ran.stdout
    assert "70,272 bytes" in ran.stdout
    assert f"with margin {pages * 8:,} tokens" in ran.stdout


def test_no_window_above_the_trained_one(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS["Llama-3.1-8B"]))
    fields, trained = load_config(file)
    found = plan_pool(fields, trained, memory=2**40, decode_memory=2**40)
    assert found.window == 131072


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"max_position_embeddings": 5}'])
def test_a_bad_file_is_one_line_and_2(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    for path in (file, tmp_path / "none.json"):
        ran = CliRunner().invoke(APP, [str(path), "--memory", "20GiB"])
        assert ran.exit_code == 2
        assert ran.stdout == ""
        assert len(ran.stderr.splitlines()) == 1
