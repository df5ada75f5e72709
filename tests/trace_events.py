"""What is wrong with a file of the trace event format, which Perfetto opens."""

from __future__ import annotations

from typing import Any

NUMBER = (int, float)
REQUIRED: dict[
    str, dict[str, Any]
] = {  # by phase: the keys that the format asks for, and their types
    "X": {"name": str, "cat": str, "ts": NUMBER, "dur": NUMBER, "pid": int, "tid": int},
    "M": {"name": str, "pid": int, "args": dict},
    "C": {"name": str, "ts": NUMBER, "pid": int, "args": dict},
}
METADATA = {  # name -> the key of its args
    "process_name": "name",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def faults(document: Any) -> list[str]:
    """Where a document is not the JSON object form of the trace event format: its keys, names
    before their use, complete events of a thread nested or apart, counters with numbers."""
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["no object with a list traceEvents"]
    found = []
    if document.get("displayTimeUnit") not in ("ms", "ns"):
        found.append("displayTimeUnit")
    named: set[tuple[int, int | None]] = set()
    open_until: dict[tuple[int, int], list[float]] = {}
    complete = []
    for event in document["traceEvents"]:
        phase = event.get("ph")
        if phase not in REQUIRED:
            found.append(f"phase {phase!r}")
            continue
        wrong = [k for k, kind in REQUIRED[phase].items() if not isinstance(event.get(k), kind)]
        found += [f"{phase} {event.get('name')}: {key}" for key in wrong]
        if wrong:
            continue
        if phase == "M":
            if METADATA.get(event["name"], "?") not in event["args"]:
                found.append(f"metadata {event['name']}")
            if event["name"] == "process_name":
                named.add((event["pid"], None))
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
        elif (event["pid"], None) not in named:
            found.append(f"process {event['pid']} has no name")
        if phase == "C" and not all(isinstance(v, NUMBER) for v in event["args"].values()):
            found.append(f"counter {event['name']}")
        if phase == "X":
            complete.append(event)
    for event in sorted(complete, key=lambda e: (e["ts"], -e["dur"])):
        key = (event["pid"], event["tid"])
        if key not in named:
            found.append(f"thread {key} has no name")
        if event["dur"] < 0:
            found.append(f"{event['name']} ends before it begins")
        stack_of = open_until.setdefault(key, [])
        while stack_of and stack_of[-1] <= event["ts"] + 1e-3:
            stack_of.pop()
        end = event["ts"] + event["dur"]
        if stack_of and end > stack_of[-1] + 1e-2:
            found.append(f"{event['name']} overlaps the one before it")
        stack_of.append(end)
    return found
