"""The example's model trained in several precisions: validation losses beside that of float32.

    python -m benchmarks.precision --out results.md

Every run is `examples/train_lm.py` with the same data, seeds and learning rates; what differs is
the dtype of the parameters, of the compute and of AdamW's moments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import publish

EXAMPLES = Path(__file__).parent.parent / "examples"
RUNS = {  # name -> flags of the example
    "float32": [],
    "float32, 8-bit moments": ["--state-dtype", "int8"],
    "float32 masters, bfloat16 compute": ["--compute-dtype", "bfloat16"],
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
    args, flags = parser.parse_known_args(argv)
    sys.path.insert(0, str(EXAMPLES))
    import train_lm

    rows: list[dict[str, object]] = []
    reference = 0.0
    for name, own in RUNS.items():
        losses = train_lm.main([*flags, *own]).validation
        loss = losses[max(losses)]
        reference = reference or loss
        rows.append(
            {
                "parameters and moments": name,
                "validation loss": f"{loss:.4f}",
                "to float32": f"{loss / reference - 1:+.2%}",
            }
        )
    publish(f"Precision, {max(losses)} steps of examples/train_lm.py", rows, args.out)
    return rows


if __name__ == "__main__":
    main()
