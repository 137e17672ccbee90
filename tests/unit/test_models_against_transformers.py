"""Both runners against `transformers`: every architecture, and the demo model on real text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers_models import (
    MODELS,
    headers,
    make_batch,
    make_runner,
    random_model,
    scattered_tables,
)
from numpy.typing import NDArray

from sekisho.engine.spec import load_spec
from sekisho.engine.weights import load_weights

RUNNERS = ["reference", "native"]
# The last one runs far past the 64 positions that the Llama 3 scaling calls the original window.
LENGTHS = [1, 16, 17, 45, 300]

# Jane Austen, Pride and Prejudice (1813), chapter 1.
TEXT = """It is a truth universally acknowledged, that a single man in possession of a good \
fortune, must be in want of a wife. However little known the feelings or views of such a man may \
be on his first entering a neighbourhood, this truth is so well fixed in the minds of the \
surrounding families, that he is considered the rightful property of some one or other of their \
daughters. "My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield \
Park is let at last?" Mr. Bennet replied that he had not. "But it is," returned she; "for Mrs. \
Long has just been here, and she told me all about it." Mr. Bennet made no answer. "Do you not \
want to know who has taken it?" cried his wife impatiently. "You want to tell me, and I have no \
objection to hearing it." This was invitation enough."""


def logits_of(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_transformers(
    name: str, kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = random_model(name)
    model.save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    weights = load_weights(tmp_path, spec, torch.float32)
    tables, page_count = scattered_tables(LENGTHS, 16, rng)
    runner, region, layout = make_runner(kind, spec, weights, page_count)
    texts = [rng.integers(0, spec.vocab_size, length).tolist() for length in LENGTHS]
    found = runner.forward(
        make_batch([(text, 0, table) for text, table in zip(texts, tables, strict=True)])
    )
    expected = np.concatenate([logits_of(model, text) for text in texts])
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    assert (headers(region, layout) == 0xFF).all(), "a runner must not touch headers"


@pytest.fixture(scope="module")
def demo(demo_model_folder: Path) -> tuple[Path, list[int], Any, NDArray[np.float32]]:
    """Folder, token ids of `TEXT`, the model in transformers in fp32, and its logits."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        demo_model_folder, dtype=torch.float32
    ).eval()
    tokens = tokenizer(TEXT)["input_ids"]
    return demo_model_folder, tokens, model, logits_of(model, tokens)


def run_demo(folder: Path, kind: str, dtype: torch.dtype, tokens: list[int]) -> Any:
    spec = load_spec(folder)
    weights = load_weights(folder, spec, dtype)
    pages = list(range(-(-len(tokens) // 16)))[::-1]
    runner, _, _ = make_runner(kind, spec, weights, len(pages))
    return runner.forward(make_batch([(tokens, 0, pages)]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNNERS)
def test_demo_model_in_fp32_agrees_on_real_text(
    kind: str, demo: tuple[Path, list[int], Any, NDArray[np.float32]]
) -> None:
    folder, tokens, _, expected = demo
    found = run_demo(folder, kind, torch.float32, tokens)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def mean_kl(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """Mean over rows of KL(expected || found) in nats."""
    p = torch.from_numpy(expected).double().log_softmax(-1)
    q = torch.from_numpy(found).double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNNERS)
def test_demo_model_in_bf16_stays_near_fp32_on_real_text(
    kind: str, demo: tuple[Path, list[int], Any, NDArray[np.float32]]
) -> None:
    """Against fp32 arithmetic on the same bf16 weights. Only K and V (and, where the machine has
    bf16 products, their inputs) are rounded, so we must be no further off than transformers'
    own bf16, which rounds every activation."""
    folder, tokens, model, expected = demo
    theirs = mean_kl(expected, logits_of(model.to(torch.bfloat16), tokens))
    model.to(torch.float32)
    found = run_demo(folder, kind, torch.bfloat16, tokens)
    agreement = (found.argmax(-1) == expected.argmax(-1)).mean()
    assert agreement >= 0.97
    assert mean_kl(expected, found) <= min(5e-4, theirs)
