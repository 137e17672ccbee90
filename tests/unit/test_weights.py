"""Reading safetensors: fused as the runners want them, and nothing that does not fit."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers_models import random_model
from safetensors.torch import load_file, save_file

from sekisho.engine.spec import ModelError, ModelSpec, load_spec
from sekisho.engine.weights import ModelWeights, load_weights

INDEX = "model.safetensors.index.json"


def tensors_of(weights: ModelWeights) -> list[torch.Tensor]:
    found = [weights.embedding, weights.final_norm, weights.lm_head]
    for layer in weights.layers:
        values = (getattr(layer, field.name) for field in dataclasses.fields(layer))
        found += [value for value in values if value is not None]
    return found


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, ModelSpec]:
    random_model("llama").save_pretrained(tmp_path)
    return tmp_path, load_spec(tmp_path)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_matrices_are_fused_in_order(llama: tuple[Path, ModelSpec]) -> None:
    folder, spec = llama
    raw = load_file(folder / "model.safetensors")
    weights = load_weights(folder, spec, torch.float32)
    layer, prefix = weights.layers[1], "model.layers.1."
    qkv = [raw[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    gate_up = [raw[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.qkv, torch.cat(qkv))
    assert torch.equal(layer.gate_up, torch.cat(gate_up))
    assert torch.equal(layer.mlp_norm, raw[f"{prefix}post_attention_layernorm.weight"])
    assert torch.equal(weights.lm_head, raw["lm_head.weight"])
    assert layer.qkv_bias is None
    assert layer.mlp_out_norm is None


def test_glm4_gives_fused_gate_up_and_four_norms(tmp_path: Path) -> None:
    random_model("glm4").save_pretrained(tmp_path)
    raw = load_file(tmp_path / "model.safetensors")
    layer = load_weights(tmp_path, load_spec(tmp_path), torch.float32).layers[0]
    prefix = "model.layers.0."
    assert torch.equal(layer.gate_up, raw[f"{prefix}mlp.gate_up_proj.weight"])
    assert layer.attention_out_norm is not None
    assert layer.mlp_out_norm is not None
    assert torch.equal(layer.attention_out_norm, raw[f"{prefix}post_self_attn_layernorm.weight"])
    assert torch.equal(layer.mlp_out_norm, raw[f"{prefix}post_mlp_layernorm.weight"])
    assert layer.qkv_bias is not None


def test_bf16_rounds_matrices_and_keeps_vectors_in_fp32(tmp_path: Path) -> None:
    random_model("qwen2").save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    exact = load_weights(tmp_path, spec, torch.float32)
    served = load_weights(tmp_path, spec, torch.bfloat16)
    for before, after in zip(tensors_of(exact), tensors_of(served), strict=True):
        assert after.dtype == (torch.bfloat16 if after.ndim == 2 else torch.float32)
        assert torch.equal(after, before.to(after.dtype))
    assert served.lm_head is served.embedding


def test_shards_give_the_same_weights(llama: tuple[Path, ModelSpec], tmp_path: Path) -> None:
    folder, spec = llama
    sharded = tmp_path / "sharded"
    random_model("llama").save_pretrained(sharded, max_shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    expected = tensors_of(load_weights(folder, spec, torch.float32))
    found = tensors_of(load_weights(sharded, load_spec(sharded), torch.float32))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_progress_counts_the_layers(llama: tuple[Path, ModelSpec]) -> None:
    seen: list[tuple[int, int]] = []
    load_weights(*llama, torch.float32, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_weights_outlive_their_file(llama: tuple[Path, ModelSpec]) -> None:
    folder, spec = llama
    weights = load_weights(folder, spec, torch.float32)
    before = [tensor.clone() for tensor in tensors_of(weights)]
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(weights), strict=True))


def test_a_missing_tensor_is_named(llama: tuple[Path, ModelSpec]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    change(llama[0], lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError) as caught:
        load_weights(*llama, torch.float32)
    assert str(caught.value) == f"tensor {name}: expected shape (96, 180), found none"


def test_a_surplus_tensor_is_named(llama: tuple[Path, ModelSpec]) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    change(llama[0], lambda tensors: tensors.update({name: torch.zeros(96)}))
    with pytest.raises(ModelError) as caught:
        load_weights(*llama, torch.float32)
    assert str(caught.value) == f"tensor {name}: expected none, found shape (96,)"


def test_a_wrong_shape_is_named_with_both(llama: tuple[Path, ModelSpec]) -> None:
    name = "model.norm.weight"
    change(llama[0], lambda tensors: tensors.update({name: torch.zeros(97)}))
    with pytest.raises(ModelError) as caught:
        load_weights(*llama, torch.float32)
    assert str(caught.value) == f"tensor {name}: expected shape (96,), found (97,)"


def test_quantized_elements_are_refused(llama: tuple[Path, ModelSpec]) -> None:
    quantized = {"model.norm.weight": torch.zeros(96, dtype=torch.int8)}
    change(llama[0], lambda tensors: tensors.update(quantized))
    with pytest.raises(ModelError, match=r"model\.norm\.weight: dtype I8"):
        load_weights(*llama, torch.float32)


def test_an_old_rope_table_is_passed_over(llama: tuple[Path, ModelSpec]) -> None:
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    change(llama[0], lambda tensors: tensors.update(table))
    load_weights(*llama, torch.float32)


def test_a_tied_model_may_carry_its_embedding_twice(tmp_path: Path) -> None:
    random_model("llama-tied").save_pretrained(tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(251, 96)}))
    weights = load_weights(tmp_path, load_spec(tmp_path), torch.float32)
    assert weights.lm_head is weights.embedding
    assert weights.embedding.any()


def test_a_cut_file_is_one_line(llama: tuple[Path, ModelSpec]) -> None:
    path = llama[0] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot read the weights in") as caught:
        load_weights(*llama, torch.float32)
    assert "\n" not in str(caught.value)


def test_no_weights_is_one_line(llama: tuple[Path, ModelSpec]) -> None:
    (llama[0] / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor"):
        load_weights(*llama, torch.float32)


def sharded_as(folder: Path, shard: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))


@pytest.mark.parametrize(
    "shard", ["../a.safetensors", "/etc/a.safetensors", "a/b.safetensors", "..", "", "a.bin"]
)
def test_a_shard_outside_the_folder_is_refused(
    shard: str, llama: tuple[Path, ModelSpec], tmp_path: Path
) -> None:
    sharded_as(llama[0], shard)
    with pytest.raises(ModelError, match="is not a file of the folder"):
        load_weights(*llama, torch.float32)


def test_a_missing_shard_is_named(llama: tuple[Path, ModelSpec]) -> None:
    sharded_as(llama[0], "model-1-of-1.safetensors")
    with pytest.raises(ModelError, match=r"shard model-1-of-1\.safetensors does not exist"):
        load_weights(*llama, torch.float32)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_broken_index_is_refused(index: str, llama: tuple[Path, ModelSpec]) -> None:
    (llama[0] / "model.safetensors").unlink()
    (llama[0] / INDEX).write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        load_weights(*llama, torch.float32)


def test_another_serving_dtype_is_a_fault_of_the_caller(llama: tuple[Path, ModelSpec]) -> None:
    with pytest.raises(ValueError, match=r"torch\.float16"):
        load_weights(*llama, torch.float16)
