"""Reading ``config.json``: what is supported is read exactly, what is not is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_models import LLAMA3_ROPE, MODELS, random_model
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from sekisho.engine.spec import ModelError, ModelSpec, load_spec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
GLM4 = LLAMA | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "head_dim": 32}


def read(folder: Path, config: dict[str, Any], generation: Any = None) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_spec(folder)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_every_field_is_read(tmp_path: Path) -> None:
    spec = read(tmp_path, GLM4 | {"attention_bias": True, "tie_word_embeddings": True})
    assert (spec.architecture, spec.hidden_size, spec.intermediate_size) == (
        "Glm4ForCausalLM",
        64,
        128,
    )
    assert (spec.layer_count, spec.head_count, spec.kv_head_count, spec.head_size) == (2, 4, 2, 32)
    assert (spec.vocab_size, spec.rms_norm_eps, spec.context_size) == (100, 1e-5, 512)
    assert (spec.rotary_dim, spec.rope_interleaved, spec.rope_attention_factor) == (16, True, 1.0)
    assert (spec.qkv_bias, spec.qk_norm, spec.sandwich_norm) == (True, False, True)
    assert (spec.tied_embeddings, spec.eos_token_ids) == (True, (2,))


@pytest.mark.parametrize(
    ("config", "qkv_bias", "qk_norm", "sandwich_norm", "head_size"),
    [
        (LLAMA, False, False, False, 16),
        (MISTRAL | {"head_dim": 32}, False, False, False, 32),
        (QWEN2, True, False, False, 16),
        (QWEN3, False, True, False, 128),  # 128 is what the field means where it is left out
        (GLM4 | {"attention_bias": False}, False, False, True, 32),
    ],
)
def test_what_an_architecture_implies(
    config: dict[str, Any],
    qkv_bias: bool,
    qk_norm: bool,
    sandwich_norm: bool,
    head_size: int,
    tmp_path: Path,
) -> None:
    spec = read(tmp_path, config)
    assert (spec.qkv_bias, spec.qk_norm, spec.sandwich_norm) == (qkv_bias, qk_norm, sandwich_norm)
    assert spec.head_size == head_size
    assert spec.rope_interleaved == spec.sandwich_norm


def test_kv_heads_left_out_means_one_for_each_head(tmp_path: Path) -> None:
    assert read(tmp_path, without(LLAMA, "num_key_value_heads")).kv_head_count == 4
    assert read(tmp_path, LLAMA | {"num_key_value_heads": None}).kv_head_count == 4


def inv_freq_of_transformers(folder: Path) -> NDArray[np.float32]:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    values: NDArray[np.float32] = model.model.rotary_emb.inv_freq.numpy()
    return values


@pytest.mark.parametrize("name", MODELS)
def test_inverse_frequencies_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    expected = model.model.rotary_emb.inv_freq.numpy()
    assert np.array_equal(load_spec(tmp_path).inv_freq, expected)


@pytest.mark.parametrize("scaling_name", ["rope_type", "type"])
def test_the_spelling_before_transformers_5_means_the_same(
    scaling_name: str, tmp_path: Path
) -> None:
    new = read(tmp_path, without(LLAMA, "rope_theta") | {"rope_parameters": LLAMA3_ROPE})
    scaling = without(LLAMA3_ROPE, "rope_theta", "rope_type") | {scaling_name: "llama3"}
    old = read(tmp_path, LLAMA | {"rope_scaling": scaling})
    assert np.array_equal(old.inv_freq, new.inv_freq)
    assert np.array_equal(old.inv_freq, inv_freq_of_transformers(tmp_path))
    assert not np.array_equal(old.inv_freq, read(tmp_path, LLAMA).inv_freq)


def test_rope_theta_is_read_in_both_places(tmp_path: Path) -> None:
    old = read(tmp_path, LLAMA | {"rope_theta": 500000})
    new = read(tmp_path, without(LLAMA, "rope_theta") | {"rope_parameters": {"rope_theta": 5e5}})
    assert np.array_equal(old.inv_freq, new.inv_freq)
    assert old.inv_freq[-1] < read(tmp_path, LLAMA).inv_freq[-1]


@pytest.mark.parametrize(
    ("config", "context_size"),
    [
        (LLAMA, 512),
        (MISTRAL | {"sliding_window": None}, 512),
        (MISTRAL | {"sliding_window": 128}, 128),
        (MISTRAL | {"sliding_window": 4096}, 512),
        (MISTRAL | {"max_position_embeddings": 32768}, 4096),  # left out, it means 4096
        (QWEN2 | {"sliding_window": 128, "use_sliding_window": False}, 512),
        (QWEN2 | {"sliding_window": 128, "use_sliding_window": True}, 128),
        (
            QWEN3
            | {
                "sliding_window": 128,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "full_attention"],
            },
            512,
        ),
    ],
)
def test_context_is_no_longer_than_a_sliding_window(
    config: dict[str, Any], context_size: int, tmp_path: Path
) -> None:
    assert read(tmp_path, config).context_size == context_size


@pytest.mark.parametrize(
    ("generation", "config_eos", "expected"),
    [
        ({"eos_token_id": [5, 6]}, 2, (5, 6)),
        ({"eos_token_id": 5}, 2, (5,)),
        ({}, [2, 3], (2, 3)),
        (None, 2, (2,)),
        (None, None, ()),
    ],
)
def test_end_of_sequence_ids(
    generation: Any, config_eos: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    spec = read(tmp_path, LLAMA | {"eos_token_id": config_eos}, generation)
    assert spec.eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (LLAMA | {"architectures": ["MixtralForCausalLM"]}, "architectures", "Mixtral"),
        (without(LLAMA, "architectures"), "architectures", "None"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act", "gelu"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias", "True"),
        (LLAMA | {"attention_bias": True}, "attention_bias", "True"),
        (QWEN3 | {"attention_bias": True}, "attention_bias", "True"),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, "quantization_config", "awq"),
        (LLAMA | {"num_local_experts": 8}, "num_local_experts", "8"),
        (LLAMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping", "30.0"),
        (LLAMA | {"layer_types": ["linear_attention"]}, "layer_types", "linear_attention"),
        (LLAMA | {"hidden_size": 0}, "hidden_size", "0"),
        (LLAMA | {"hidden_size": 66}, "hidden_size", "66"),
        (LLAMA | {"vocab_size": "many"}, "vocab_size", "many"),
        (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers", "True"),
        (without(LLAMA, "intermediate_size"), "intermediate_size", "None"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads", "3"),
        (without(QWEN2, "num_key_value_heads"), "num_key_value_heads", "None"),
        (LLAMA | {"rms_norm_eps": float("nan")}, "rms_norm_eps", "nan"),
        (LLAMA | {"rms_norm_eps": "1e-5"}, "rms_norm_eps", "1e-5"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings", "yes"),
        (LLAMA | {"rope_theta": -1}, "rope_theta", "-1"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
        (GLM4 | {"partial_rotary_factor": 2.0}, "partial_rotary_factor", "2"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type", "yarn"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type", "dynamic"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "None"),
        (LLAMA | {"rope_scaling": "linear"}, "rope_scaling", "linear"),
        (
            LLAMA | {"rope_parameters": {"mrope_section": [2, 3, 3]}},
            "rope_parameters.mrope_section",
            "[2, 3, 3]",
        ),
        (
            LLAMA | {"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0}},
            "rope_parameters.high_freq_factor",
            "1.0",
        ),
        (LLAMA | {"eos_token_id": "</s>"}, "eos_token_id", "</s>"),
    ],
)
def test_what_would_change_the_meaning_is_refused_by_name(
    config: dict[str, Any], field: str, value: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, config)
    message = str(caught.value)
    assert field in message
    assert value in message
    assert "\n" not in message


def test_a_missing_folder_or_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_spec(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_spec(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe{}"])
def test_a_broken_config_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_spec(tmp_path)
