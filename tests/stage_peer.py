"""A stage in a process of its own, for the tests that kill it.

    python stage_peer.py sends|receives DIRECTORY [MODE]

It is the stage ``peer``; the test is the stage ``here``. ``sends``: each line of its input is a JSON list:
an external id, a number of chunks, and a word if it shall end. ``receives``: it takes what comes. It prints one JSON
list a line for each happening.
"""

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from omni_fsm.adapters import StageRunnerAdapter
from omni_fsm.connectors import Hello, shm_receiver, shm_sender
from omni_fsm.protocol import Edge
from omni_fsm.runtime import StageConfig, TakenKind, on_sigterm
from omni_fsm.tables import spec_digest


def say(*happening: Any) -> None:
    sys.stdout.write(json.dumps(happening) + "\n")
    sys.stdout.flush()


def send(adapter: StageRunnerAdapter, names: dict[str, str]) -> None:
    for line in sys.stdin:
        external_id, chunks, is_whole = json.loads(line)
        request, _ = adapter.open(external_id)
        names[request] = external_id
        for number in range(chunks):
            adapter.submit_chunk(request, number)
        if is_whole:
            adapter.end(request)
        say("submitted", external_id)


def receive(adapter: StageRunnerAdapter, stopping: threading.Event) -> None:
    names: dict[str, str] = {}
    while not stopping.is_set():
        feedback = adapter.collect_feedback(0.1)
        for request, identity in feedback.registered.items():
            names[request] = identity.external_id
        for request, cause in feedback.failed.items():
            say("failed", names[request], str(cause))
            adapter.release(request)
        for request in feedback.ready:
            while (taken := adapter.take(request)).kind in (TakenKind.CHUNK, TakenKind.END):
                payload = taken.payload
                say(str(taken.kind), names[request], len(payload) if isinstance(payload, bytes) else payload)


def main() -> None:
    role, directory = sys.argv[1], Path(sys.argv[2])
    mode = sys.argv[3] if len(sys.argv) > 3 else "chunks"
    config = StageConfig(stage="peer", shutdown_grace_s=2.0)
    stopping = threading.Event()
    if role == "sends":
        hello = Hello(Edge("peer", "here"), spec_digest(), mode)
        adapter = StageRunnerAdapter(config, sink=shm_sender(hello, directory))
    else:
        hello = Hello(Edge("here", "peer"), spec_digest(), mode)
        adapter = StageRunnerAdapter(config, source=shm_receiver(hello, directory))
    on_sigterm(adapter.lifecycle, stopping.set)
    with adapter:
        say("up")
        if role == "sends":
            names: dict[str, str] = {}
            threading.Thread(target=send, args=(adapter, names), daemon=True).start()
            while not stopping.is_set():
                for request in adapter.collect_feedback(0.1).output_ended:
                    say("out", names[request])
        else:
            receive(adapter, stopping)
    say("down")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    main()
