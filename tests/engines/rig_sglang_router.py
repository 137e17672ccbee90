"""SGLang's own router in front of a pair: one address, as its users have it."""

from install import ROUTER
from rig import EngineProcess, Engines, environment, free_port, installed
from rig_sglang import SglangPair


class SglangRouter(Engines):
    """Runs in front of a pair that is ready; ``url`` is what a client is given.

    Raises:
        EngineError: it is not installed.
    """

    def __init__(self, pair: SglangPair) -> None:
        ask = f"sglang {pair.version}"
        python = installed("sglang", "venv", ask=ask) / "bin" / "python"
        port = free_port()
        command = [
            *(str(python), "-m", "sglang_router.launch_router"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
            "--pd-disaggregation",
            *("--prefill", pair.prefill.url, str(pair.bootstrap_port)),
            *("--decode", pair.decode.url),
        ]
        env = environment([installed("sglang", f"router-{ROUTER}", ask=ask)], {})
        log = pair.folder / "router.log"
        super().__init__([EngineProcess("sglang-router", command, env, port, log)])
        [self.router] = self.processes
        self.url = self.router.url
