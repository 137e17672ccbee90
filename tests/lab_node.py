"""The lab's engine as somebody might wrongly put it behind a gateway: a node process.

    python tests/lab_node.py CONFIG

It joins as any node does, with the word that the lab's engine has of itself, and listens; what it
is given goes to the file that SEKISHO_TEST_GIVEN names. No command of the product reaches this.
"""

import os
import sys
from pathlib import Path

import msgspec
import zmq

from lab_kit import stand_in_lab
from sekisho.lab.switches import DEFECTS, DEFENCES, switches
from sekisho.node import wire
from sekisho.node.build import NodeConfig
from sekisho.node.loop import GatewayLine
from sekisho.node.messages import Generate


def main() -> None:
    config = msgspec.json.decode(sys.argv[1], type=NodeConfig)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = GatewayLine(context, config)
    machine = stand_in_lab().machine
    machine.start(switches(DEFECTS, DEFENCES))  # as safe as it can be made
    line.send([machine.ready()])
    while os.getppid() == config.parent:
        if line.socket.poll(200):
            for message in wire.decode_to_node(line.socket.recv_multipart()[-1]):
                if isinstance(message, Generate):
                    Path(os.environ["SEKISHO_TEST_GIVEN"]).write_text("a request")


if __name__ == "__main__":
    main()
