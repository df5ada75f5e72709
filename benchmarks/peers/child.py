"""The process of one point: `python -m benchmarks.peers.child REQUEST EVENTS`.

REQUEST is JSON. What the process does, and its outcome at the end, are lines of JSON in the file
EVENTS, so that a system may print what it likes. The process ends without waiting for threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str]) -> None:
    """Measure and write the outcome."""
    request: Mapping[str, Any] = json.loads(argv[0])
    events = Path(argv[1])
    sys.path += request["paths"]  # behind what is installed: packages are added, not replaced
    with contextlib.suppress(OSError):  # if memory runs out, the system ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")

    def write(line: Mapping[str, Any]) -> None:
        with events.open("a") as file:
            file.write(json.dumps(line) + "\n")

    from benchmarks.peers.catalogue import PEERS
    from benchmarks.peers.measure import outcome
    from benchmarks.peers.work import Point

    point = Point.of_json(request["point"])
    result = outcome(
        PEERS[point.peer],
        point.setting,
        request["device"],
        request["warm"],
        request["steps"],
        lambda doing: write({"doing": doing}),
    )
    write({"outcome": result.as_json()})


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads and collectives of a system may never end
