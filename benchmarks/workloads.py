"""Models as people train them now: beside the plain loop, and beside what was predicted.

    python -m benchmarks.workloads --out results.md
    python -m benchmarks.workloads --case qwen3-8b-16 --case flux-lora --steps 4
    python -m benchmarks.workloads --tiny --device cpu     # whether it runs: no figures

The models have their shapes (`workload_models.py`), random weights, bf16, and AdamW with
the moments of the plain loop, in bf16, unless the case says 8 bits. All gradients are clipped to
norm 1, but for `optimizer=`. Each run is a process of its own with a time limit.

    first step s    from the call of `megacompile()` to the end of the first step
    s a step        the median of the late steps, whose batches have many sizes; from one loss on
                    the host to the next
    tokens/s        of all late steps together, from idle to idle, without what fills batches up
    largest s       the median of steps that repeat the first batch, which has the largest sizes:
                    what `predicted s` is for, because a plan and its prediction are for the
                    largest sizes so far. Generation is in neither.
    late captures   programs that were made in the late steps: 0 if lengths do not matter
    host GiB        resident set after the last step, less what it was before the model was there
    plain           the same loop with gradient checkpointing, on all of the device: where it fits
    losses apart    the largest difference to the plain loss, of the steps before the late ones
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import child
from benchmarks.models import write
from benchmarks.process_memory import status_bytes
from benchmarks.report import measure_alone, publish
from benchmarks.workload_batches import GROUP, Batch, token_count
from benchmarks.workload_models import MODELS
from megacompile import eager, explain, megacompile, schedules
from megacompile.runtime.model.streamed import streamed_model
from megacompile.runtime.updates.compiled import wait_until_compiled


@dataclass(frozen=True, slots=True)
class Case:
    """A model in training."""

    model: str  # of MODELS
    cap_gib: float | None = None  # `gpu_memory=`
    in_backward: bool = False  # `optimizer=`
    state_dtype: str | None = None
    plain_fits: bool = True  # in the memory of an H200


CASES = {
    "qwen3-30b-a3b": Case("qwen3-30b-a3b", in_backward=True, state_dtype="int8", plain_fits=False),
    "qwen3-30b-a3b-nf4-lora": Case("qwen3-30b-a3b-nf4-lora", cap_gib=16),
    **{f"qwen3-8b-{gib}": Case("qwen3-8b", cap_gib=gib) for gib in (10, 16, 24)},
    **{f"qwen3-8b-lora-{gib}": Case("qwen3-8b-lora", cap_gib=gib) for gib in (10, 16, 24)},
    "flux-lora": Case("flux-lora", cap_gib=16),
    "qwen2.5-vl-7b-lora": Case("qwen2.5-vl-7b-lora", cap_gib=24),
    "qwen3-1.7b-grpo": Case("qwen3-1.7b-grpo"),
}
# The batches before the late ones: the second size is captured as a symbol, and then meets the
# largest one.
_WARM = (0, 1, 0, 2, 3, 4)
_PATIENCE_S = 120.0  # until code that is compiled in the background is there
_REPEATED = 4
_LATE = 100  # the number of the first late batch


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, default=[])
    parser.add_argument("--steps", type=int, default=6, help="late ones, of many sizes")
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds for each process")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain loop out")
    parser.add_argument("--host", type=float, help="GiB of host memory; default: what is free")
    parser.add_argument("--tiny", action="store_true", help="small layers and few tokens")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lowering", help="of megacompile; default: its own")
    parser.add_argument("--explain", action="store_true", help="print what explain() says")
    parser.add_argument("--out", help="write the table here")
    parser.add_argument("--inside", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        child.tell(measure(CASES[args.inside], args))
        return []
    if args.device == "cuda":
        measure_alone()
    rows = []
    plain: dict[str, dict[str, Any]] = {}  # by model: the cases of one share it
    for name in args.case or CASES:
        case, inside = CASES[name], [*(sys.argv[1:] if argv is None else argv), "--inside", name]
        row: dict[str, Any] = {"case": name, "GPU memory": _text(case.cap_gib)}
        if missing := [each for each in MODELS[case.model].needs if not _is_there(each)]:
            row["s a step"] = f"skipped: needs {', '.join(missing)}"
        else:
            row |= child.run(name, "benchmarks.workloads", inside, args.time_limit)
            wanted = case.model not in plain and (case.plain_fits or args.tiny)
            if wanted and not args.no_plain:
                inside.append("--plain")
                label = f"{case.model}, plain"
                plain[case.model] = child.run(
                    label, "benchmarks.workloads", inside, args.time_limit
                )
            row |= _beside(plain.get(case.model, {}), row)
        rows.append(row)
        print(row, flush=True)
    for row in rows:
        row.pop("losses", None)
    publish("Models as people train them now", rows, args.out)
    return rows


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _text(cap_gib: float | None) -> str:
    return "all" if cap_gib is None else f"{cap_gib:g} GiB"


def _beside(plain: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, object]:
    """The plain loop's part of a row."""
    if "failed" in plain:
        return {"plain s a step": plain["failed"]}
    found = {f"plain {name}": plain[name] for name in ("s a step", "tokens/s") if name in plain}
    if "losses" in plain and "losses" in row:
        pairs = zip(plain["losses"], row["losses"], strict=True)
        found["losses apart"] = f"{max(abs(a - b) for a, b in pairs):.1e}"
    return found


class Training:
    """A model in training; `step` is what a user's loop does."""

    def __init__(self, case: Case, args: argparse.Namespace) -> None:
        self.kind, self.device, self.plain = MODELS[case.model], args.device, args.plain
        self.clips, self.generated_s = not case.in_backward, 0.0
        model = self.kind.build(self.device if self.plain else "cpu", tiny=args.tiny)
        self.sizes = self.kind.tiny_sizes if args.tiny else self.kind.sizes
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4 if self.kind.lora else 1e-5)
        self.made_s = 0.0
        if self.plain:
            _checkpoint(model)
        else:
            start = time.perf_counter()
            model = megacompile(model, **self._options(case, args))
            self.made_s = time.perf_counter() - start
        if not self.kind.nf4:
            write(model, self.device)
        if self.device == "cuda":
            torch.cuda.empty_cache()  # of the values that were drawn there
        self.model = model

    def _options(self, case: Case, args: argparse.Namespace) -> dict[str, Any]:
        options: dict[str, Any] = {"device": self.device, "progress": False}
        options |= {"state_dtype": case.state_dtype, "lowering": args.lowering}
        if case.cap_gib is not None:
            options["gpu_memory"] = f"{case.cap_gib:g}GiB"
        if args.host is not None:
            options["host_memory"] = f"{args.host:g}GiB"
        if case.in_backward:
            options["optimizer"] = self.optimizer
        return options

    def step(self, batch: Batch) -> float:
        """One optimizer step; gives the loss."""
        batch = {name: value.to(self.device) for name, value in batch.items()}
        if self.sizes.new_tokens:
            loss = self._policy_loss(self._answered(batch))
        else:
            loss = self.model(**batch)
        loss.backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def _answered(self, batch: Batch) -> Batch:
        """The prompts with answers: generated as docs/recipes.md has it, between two steps."""
        start, count = time.perf_counter(), self.sizes.new_tokens
        self.model.eval()
        model: Any = self.model
        with torch.no_grad(), contextlib.nullcontext() if self.plain else eager(model):
            ids = model.generate(
                **batch,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
            )
        self.model.train()
        self.generated_s = time.perf_counter() - start
        mask = torch.cat([batch["attention_mask"], torch.ones_like(ids[:, -count:])], 1)
        return {"input_ids": ids, "attention_mask": mask}

    def _policy_loss(self, batch: Batch) -> Tensor:
        """GRPO's loss with one step for each answer; an even token is worth a reward."""
        count = self.sizes.new_tokens
        answers = batch["input_ids"][:, -count:]
        rewards = (answers % 2 == 0).float().mean(1).view(-1, GROUP)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (
            rewards.std(1, keepdim=True) + 1e-4
        )
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        kept = {"use_cache": False, "logits_to_keep": count + 1}
        logits = self.model(**batch, position_ids=positions, **kept).logits[:, :-1]
        found = logits.float().log_softmax(-1).gather(2, answers[..., None])[..., 0]
        loss: Tensor = -(advantages.view(-1, 1) * found).mean()
        return loss

    def wait(self) -> None:
        """Wait for the updates that run in the background, by a look at each parameter."""
        for param in self.trained:
            param.flatten()[:1].tolist()
        if self.device == "cuda":
            torch.cuda.synchronize()


def _checkpoint(model: Any) -> None:
    """Gradient checkpointing, as each library has it."""
    inner = getattr(model, "model", model)
    inner = model if hasattr(model, "gradient_checkpointing_enable") else inner
    if hasattr(inner, "gradient_checkpointing_enable"):
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        inner.enable_gradient_checkpointing()


def measure(case: Case, args: argparse.Namespace) -> dict[str, object]:
    """One run, in this process."""
    before = status_bytes("VmRSS")
    torch.manual_seed(0)
    start = time.perf_counter()
    try:
        run = Training(case, args)
        _say("built and written", time.perf_counter() - start)
        return _measured(run, args, before)
    except torch.OutOfMemoryError:
        return {"failed": "does not fit"}


def _measured(run: Training, args: argparse.Namespace, before: int) -> dict[str, object]:
    def taken(numbers: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
        """Losses, seconds and those of generation, of steps with these batches."""
        batches = [run.kind.batch(k, tiny=args.tiny) for k in numbers]
        losses, seconds, generated = [], [], []
        last = time.perf_counter()
        for k, batch in zip(numbers, batches, strict=True):
            losses.append(run.step(batch))
            now = time.perf_counter()
            seconds.append(now - last)
            generated.append(run.generated_s)
            last = now
            _say(f"batch {k}, {token_count(batch)} tokens, loss {losses[-1]:.4f}", seconds[-1])
        return losses, seconds, generated

    losses, seconds, _ = taken(_WARM)
    row: dict[str, object] = {"first step s": f"{run.made_s + seconds[0]:.1f}"}
    if not run.plain:
        wait_until_compiled()
        waiting = streamed_model(run.model, "benchmarks").buckets.plans.compiler.pipeline
        end = time.monotonic() + _PATIENCE_S
        while waiting.to_come and time.monotonic() < end:
            if waiting.to_come.is_ready():
                taken([len(_WARM)])  # a step loads some of it
            else:
                time.sleep(0.5)
    gc.collect()
    run.wait()
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    programs = 0 if run.plain else len(schedules(run.model))
    numbers = range(_LATE, _LATE + args.steps)
    start = time.perf_counter()
    _, seconds, generated = taken(numbers)
    run.wait()
    all_s = time.perf_counter() - start
    tokens = sum(token_count(run.kind.batch(k, tiny=args.tiny)) for k in numbers)
    tokens += args.steps * run.sizes.new_tokens * run.sizes.rows
    row |= {"s a step": f"{statistics.median(seconds):.3f}", "tokens/s": f"{tokens / all_s:.0f}"}
    if run.sizes.new_tokens:
        row["generation s"] = f"{statistics.median(generated):.3f}"
    if not run.plain:
        made = len(schedules(run.model)) - programs
        _, seconds, generated = taken([0] * _REPEATED)
        run.wait()
        pairs = zip(seconds, generated, strict=True)
        largest_s = statistics.median(whole - part for whole, part in pairs)
        found = explain(run.model, changes=False)
        if args.explain:
            print(found, flush=True)
        row |= {
            "largest s": f"{largest_s:.3f}",
            "predicted s": f"{found.step_s:.3f}",
            "error": f"{found.step_s / largest_s - 1:+.0%}",
            "late captures": made,
        }
    if args.device == "cuda":
        row["peak GPU GiB"] = f"{torch.cuda.max_memory_reserved() / 2**30:.1f}"
    row["host GiB"] = f"{(status_bytes('VmRSS') - before) / 2**30:.1f}"
    return {**row, "losses": losses}


def _say(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()
