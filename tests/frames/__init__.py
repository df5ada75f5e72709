"""Programs of frames: what Dynamo captures in several graphs, or around which user code runs.

    python -m tests.frames --cases 2000 --seed 0
    python -m tests.frames --cases 200 --jobs 12 --lowering inductor --device cuda
    python -m tests.frames --seed 0 --only 17        one case: its program, and how it differs

A case is a program in a file of its own, made of one to three parts (`tests.frames.parts`), and the
options of `megacompile()`. It trains a small model for a few steps, plain and streamed. All that it
shows must be equal in every bit; but for rounding with Inductor, and where two captured graphs use
one parameter. Counted, and no mismatch:

- refused: a `MegacompileError` where the plain program goes on;
- warned: another name for a parameter's memory differs, and a warning says so;
- a known limit: docs/limits.md says that it differs (`command.LIMITS`);
- not seen: the plain program raises because of a change between a forward and its backward, and the
  streamed one does as without that change.

Needs nothing but torch: no hypothesis, no pytest.
"""
