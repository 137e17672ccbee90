"""``make serve`` answers both tenants: what .ci/run calls after the tests.

Starts the platform with the demo model on a free port, with a state folder of its own; sends the
printed curl line's request as each tenant with its printed key; ends it with SIGINT and sees
that no process is left. Exit code 0, or 1 and a line that says what did not hold.
"""

import sys
import tempfile
from pathlib import Path

import httpx2

from serve_kit import Served, ServeError, is_alive, serve

ROOT = Path(__file__).parents[1]


def main() -> int:
    with tempfile.TemporaryDirectory() as state:
        arguments = f"ARGS=--port 0 --state-dir {state}"
        command = ("make", "--no-print-directory", "-C", str(ROOT), "serve", arguments)
        try:
            with serve(command) as served:
                return _judge(served)
        except ServeError as error:
            print(error, file=sys.stderr)
            return 1


def _judge(served: Served) -> int:
    wrong = [f"{name}: {found}" for name in served.keys if (found := _ask(served, name))]
    processes = served.processes()
    served.interrupt()
    served.wait()
    wrong += [f"process {pid} is left" for pid in processes if is_alive(pid)]
    wrong += [f"{name} is left among the temporary files" for name in served.left_behind()]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def _ask(served: Served, tenant: str) -> str:
    """What is wrong with the answer to ``tenant``; empty if nothing is."""
    response = httpx2.post(
        f"{served.url}/v1/chat/completions",
        headers={"authorization": f"Bearer {served.keys[tenant]}"},
        json={
            "model": served.model,
            "messages": [{"role": "user", "content": "What is a checkpoint?"}],
            "max_tokens": 32,
        },
        timeout=120.0,
        trust_env=False,
    )
    if response.status_code != 200:
        return f"{response.status_code} {response.text}"
    text = response.json()["choices"][0]["message"]["content"]
    print(f"{tenant}: {text}")
    return "" if text else "an empty answer"


if __name__ == "__main__":
    sys.exit(main())
