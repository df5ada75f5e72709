"""The example's model trained in several precisions: validation losses beside that of float32.

    python -m benchmarks.precision --out results.md

Every run is `examples/train_lm.py` with the same data, seeds and learning rates; what differs is
the dtype of the parameters, of the compute and of AdamW's moments, or torchao's float8 in the
products of the blocks. Runs with float8 are left out where torchao is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import publish

EXAMPLES = Path(__file__).parent.parent / "examples"
REFERENCE = "float32"
VALIDATE_EVERY = 15  # steps; it changes no number of the training
RUNS = {  # name -> flags of the example
    REFERENCE: [],
    "float32, 8-bit moments": ["--state-dtype", "int8"],
    "float32 masters, bfloat16 compute": ["--compute-dtype", "bfloat16"],
    "float32 masters, float8 tensorwise": [
        *("--compute-dtype", "bfloat16", "--float8", "tensorwise"),
    ],
    "float32 masters, float8 rowwise": [
        *("--compute-dtype", "bfloat16", "--float8", "rowwise"),
    ],
    "bfloat16, float32 moments": ["--dtype", "bfloat16", "--state-dtype", "float32"],
    "bfloat16 stochastically rounded, float32 moments": [
        *("--dtype", "bfloat16", "--state-dtype", "float32", "--stochastic-rounding"),
    ],
    "bfloat16 stochastically rounded, 8-bit moments": [
        *("--dtype", "bfloat16", "--state-dtype", "int8", "--stochastic-rounding"),
    ],
    "bfloat16, bfloat16 moments": ["--dtype", "bfloat16"],
}


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="write the table here")
    parser.add_argument(
        "--only",
        action="append",
        choices=RUNS,
        metavar="NAME",
        help="run this one; may be repeated",
    )
    args, flags = parser.parse_known_args(argv)
    sys.path.insert(0, str(EXAMPLES))
    import train_lm

    rows: list[dict[str, object]] = []
    reference: float | None = None
    last = 0
    for name in args.only or RUNS:
        if "--float8" in RUNS[name] and importlib.util.find_spec("torchao") is None:
            print(f"left out, for want of torchao: {name}")
            continue
        every = ["--validate-every", str(VALIDATE_EVERY)]
        losses = train_lm.main([*every, *flags, *RUNS[name]]).validation
        last = max(losses)
        if name == REFERENCE:
            reference = losses[last]
        row: dict[str, object] = {
            "parameters and moments": name,
            "validation loss": f"{losses[last]:.4f}",
        }
        if reference is not None:
            row["to float32"] = f"{losses[last] / reference - 1:+.2%}"
        del losses[last]
        rows.append(row | {f"step {step}": f"{loss:.4f}" for step, loss in losses.items()})
    publish(f"Precision, {last} steps of examples/train_lm.py", rows, args.out)
    return rows


if __name__ == "__main__":
    main()
