"""A node process, from its configuration on the command line to its loop.

Exit codes: 2, it cannot run as configured (one line on stderr says why); anything else is a
failure that the supervisor answers with a new process of a new incarnation.
"""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from sekisho.engine.scheduler import Scheduler
from sekisho.engine.spec import ModelError
from sekisho.engine.tokenizer import load_tokenizer
from sekisho.node.build import NodeConfig, Parts, build_parts
from sekisho.node.decode import DecodeNode
from sekisho.node.loop import DecodeLoop, GatewayLine, PrefillLoop
from sekisho.node.messages import Loading
from sekisho.node.prefill import PrefillNode
from sekisho.transport import Transport, TransportError

_PR_SET_PDEATHSIG = 1


def main(
    arguments: list[str], wrap_transport: Callable[[Transport], Transport] | None = None
) -> int:
    """Run the node that the JSON in ``arguments[0]`` describes.

    ``wrap_transport`` lets tests put a faulty transport in; no command line reaches it.
    """
    config = msgspec.json.decode(arguments[0], type=NodeConfig)
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {config.name} %(name)s %(message)s",
    )
    _die_with(config.parent)
    # Ctrl-C reaches the whole group; the parent decides when a node ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = GatewayLine(context, config)
    try:
        parts = build_parts(config, lambda *step: line.send([Loading(*step)]))
        if wrap_transport is not None and parts.transport is not None:
            parts = replace(parts, transport=wrap_transport(parts.transport))
        loop = _loop(context, line, config, parts)
    except (ModelError, TransportError, MemoryError, ValueError) as error:
        print(f"{config.name}: {error}", file=sys.stderr)
        return 2
    loop.run()  # what fails from here on is a failure of the node, which is then replaced
    return 0


def _loop(
    context: "zmq.Context[zmq.Socket[bytes]]", line: GatewayLine, config: NodeConfig, parts: Parts
) -> DecodeLoop | PrefillLoop:
    if config.role == "prefill":
        if parts.transport is None:
            raise TransportError("a prefill node needs a transport")
        prefill = PrefillNode(
            parts.runner,
            parts.pages,
            parts.transport,
            tokens_max=parts.tokens_max,
            chunk_tokens=config.chunk_tokens,
            queue_max=config.queue_max,
            wait_max=config.wait_max,
        )
        return PrefillLoop(context, line, config, parts, prefill)
    scheduler = Scheduler(
        parts.runner,
        parts.pages,
        tokens_max=parts.tokens_max,
        batch_max=config.batch_max,
        chunk_tokens=config.chunk_tokens,
        queue_max=config.queue_max,
        local_prefill=config.role == "colocated",
    )
    tokenizer = load_tokenizer(Path(config.model))
    decode = DecodeNode(
        scheduler,
        parts.pages,
        tokenizer,
        vocab_size=parts.spec.vocab_size,
        wait_max=config.wait_max,
    )
    return DecodeLoop(context, line, config, parts, decode)


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process with its parent: a node without a gateway would hold
    memory for nobody (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the parent process is gone")
