"""``vllm serve`` as a local pair meets it: a process and its worker, which answers as a real one.

VLLM_PLAYER   what the role that it names does otherwise
refuse ROLE   ends with the guard's line, as without a key
mute ROLE     starts, and never answers
stubborn ROLE its worker ignores SIGTERM
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures" / "vllm_engine"
RECORDED = b"sekisho-" + b"0" * 32
WORKER = "import signal, time; signal.signal(signal.SIGTERM, signal.{}); time.sleep(600)"
SAID = ("metrics", "v1_models")


class Handler(BaseHTTPRequestHandler):
    """Answers of the role that this process has."""

    role = ""

    def do_GET(self) -> None:
        name = self.path.strip("/").replace("/", "_")
        if name == "health":
            self._answer(b"")
        else:
            self._answer(
                (FIXTURES / (f"{self.role}.{name}" if name in SAID else name)).read_bytes()
            )

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        transfer = asked["kv_transfer_params"]["transfer_id"].encode()
        body = (FIXTURES / f"greedy.{self.role}.txt").read_bytes()
        self._answer(body.replace(RECORDED, transfer))

    def log_message(self, *_: Any) -> None:
        """The log is for what this process says of itself."""

    def _answer(self, body: bytes) -> None:
        asked = self.headers.get("Authorization") == f"Bearer {os.environ['VLLM_API_KEY']}"
        self.send_response(200 if asked or not self.path.startswith("/v1") else 401)
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    flags = sys.argv[1:]
    transfer = json.loads(flags[flags.index("--kv-transfer-config") + 1])
    role = {"kv_producer": "prefill", "kv_consumer": "decode"}[transfer["kv_role"]]
    print(json.dumps({"flags": flags, "env": dict(os.environ)}), flush=True)
    other = os.environ.get("VLLM_PLAYER", "")
    if other == f"refuse {role}":
        sys.exit("(APIServer) sekisho guard: SEKISHO_GUARD_KEY has 3 bytes, it needs 16\n(a trace)")
    way = "SIG_IGN" if other == f"stubborn {role}" else "SIG_DFL"
    worker = subprocess.Popen([sys.executable, "-c", WORKER.format(way)])

    def end(*_: Any) -> None:
        worker.terminate()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    while other == f"mute {role}":
        time.sleep(600)
    Handler.role = role
    address = flags[flags.index("--host") + 1], int(flags[flags.index("--port") + 1])
    ThreadingHTTPServer(address, Handler).serve_forever()


if __name__ == "__main__":
    main()
