"""A language model trained on the Python standard library's own source, by an ordinary loop.

It shows that one line is all it takes. A GPT in plain PyTorch, `torch.optim.AdamW` with two groups
of parameters, `clip_grad_norm_`, a warm-up and cosine `LambdaLR`, gradient accumulation, validation
and checkpoints stay as they are around `model = megacompile(model)`. `--plain` leaves that line
out: with the same seed, both print the same losses.

A resumed run prints what the uninterrupted one prints from there on, and a checkpoint of a plain
run resumes as a streamed one and back:

    python examples/train_lm.py --checkpoint run.pt --stop-at 60
    python examples/train_lm.py --resume run.pt --plain

Tokens are bytes; losses are nats per byte, so a uniform guess has ln 256 = 5.55.
"""

import argparse
import dataclasses
import importlib.util
import math
import os
import pickle
import resource
import sys
import sysconfig
import time
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from megacompile import megacompile, schedules

VOCABULARY = 256  # the values of a byte
VALIDATION_SHARE = 0.1  # of the corpus: its end
LOG_EVERY = 10  # steps
VALIDATION_BATCHES = 8
DTYPES = ("float32", "bfloat16")
HALVES = ("bfloat16", "float16")
STATES = ("float32", "bfloat16", "int8")
FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")  # torchao's recipes
# What a run may set otherwise than the one that it resumes: it does not change what is trained.
FREE_ON_RESUME = (
    *("plain", "device", "validate_every"),
    *("checkpoint", "checkpoint_every", "resume", "stop_at"),
)

N = TypeVar("N", int, float)


def fail(message: str) -> NoReturn:
    """End the run with an error."""
    sys.exit(f"train_lm.py: error: {message}")


# --- flags


def within(kind: Callable[[str], N], low: float, below: float = math.inf) -> Callable[[str], N]:
    """A parser of numbers from `low` to just below `below`."""

    def parse(text: str) -> N:
        try:
            value: N | None = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value < below:  # nan and inf are outside as well
            noun = "an integer" if kind is int else "a number"
            limits = f"from {low:g}" + ("" if below == math.inf else f" to below {below:g}")
            raise argparse.ArgumentTypeError(f"got {text!r}, needed {noun} {limits}")
        return value

    return parse


COUNT = within(int, 1)


def device(text: str) -> torch.device:
    """A parser of devices that this machine has."""
    try:
        parsed = torch.device(text)
    except RuntimeError:
        parsed = torch.device("meta")
    if parsed.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"got {text!r}, needed 'cpu', 'cuda' or 'cuda:0'")
    count = torch.cuda.device_count()
    if parsed.type == "cuda" and (parsed.index or 0) >= count:
        raise argparse.ArgumentTypeError(f"got {text!r}, but this machine has {count} CUDA devices")
    return parsed


def parse_flags(argv: Sequence[str] | None) -> Namespace:
    """The command line; exits with a message that says what is wrong with it."""
    parser = ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--plain", action="store_true", help="leave megacompile out")
    add("--device", type=device, help="where to compute: a CUDA device if there is one")
    add("--dtype", choices=DTYPES, default="float32", help="of parameters and activations")
    add("--compute-dtype", choices=HALVES, help="what a float32 model is streamed and computed in")
    add("--float8", choices=FLOAT8, help="torchao's recipe for the linear layers of the blocks")
    add("--state-dtype", choices=STATES, help="of the optimizer's moments: the parameters'")
    add("--stochastic-rounding", action="store_true", help="of bfloat16 parameters")
    add("--seed", type=within(int, 0, 2**63), default=0, help="of weights, data order, dropout")

    add("--layers", type=COUNT, default=6, help="blocks of attention and MLP")
    add("--width", type=COUNT, default=384, help="of the residual stream")
    add("--heads", type=COUNT, default=6, help="of attention; they share the width")
    add("--context", type=COUNT, default=128, help="tokens in a sequence")
    add("--dropout", type=within(float, 0, 1), default=0.0, help="of activations and attention")

    add("--steps", type=COUNT, default=90, help="optimizer steps")
    add("--batch", type=COUNT, default=2, help="sequences in a forward")
    add("--accumulate", type=COUNT, default=2, help="forwards and backwards in a step")
    add("--learning-rate", type=within(float, 0), default=1e-3, help="at the end of the warm-up")
    add("--warmup", type=within(int, 0), default=20, help="steps; a cosine to a tenth follows")
    add("--weight-decay", type=within(float, 0), default=0.1, help="of matrices alone")
    add("--clip", type=within(float, 0), default=1.0, help="largest norm of the gradients")
    add("--corpus-bytes", type=COUNT, default=4_000_000, help="of source to read, at most")

    add("--validate-every", type=COUNT, default=60, help="steps; once at the end as well")
    add("--checkpoint", type=Path, help="file to write checkpoints to")
    add("--checkpoint-every", type=COUNT, help="steps; once at the end as well")
    add("--resume", type=Path, help="checkpoint to continue from, with the flags of its run")
    add("--stop-at", type=COUNT, help="step to stop after, as if interrupted there")
    flags = parser.parse_args(argv)

    if flags.width % flags.heads:
        parser.error(f"got --heads {flags.heads}, needed a divisor of --width {flags.width}")
    for name in ("width", "context"):
        size = getattr(flags, name)
        if flags.float8 is not None and size % 16:
            parser.error(f"got --{name} {size}, needed a multiple of 16 with --float8")
    if flags.float8 is not None and importlib.util.find_spec("torchao") is None:
        parser.error("--float8 needs torchao: pip install torchao")
    if flags.stop_at is not None and flags.stop_at > flags.steps:
        parser.error(f"got --stop-at {flags.stop_at}, but the run ends at --steps {flags.steps}")
    if flags.checkpoint_every is not None and flags.checkpoint is None:
        parser.error("got --checkpoint-every, needed --checkpoint PATH as well")
    if flags.checkpoint is not None and not flags.checkpoint.absolute().parent.is_dir():
        parser.error(f"got --checkpoint {flags.checkpoint}, needed a path in a folder that exists")
    if flags.resume is not None and not flags.resume.is_file():
        parser.error(f"got --resume {flags.resume}, needed a file")
    return flags


# --- the model


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x: Tensor,  # (batch, context, width)
    ) -> Tensor:  # (batch, context, width)
        batch, context, width = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (batch, heads, context, width / heads)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        y = y.transpose(1, 2).reshape(batch, context, width)
        out: Tensor = self.out(y)
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,  # (batch, context, width)
    ) -> Tensor:  # (batch, context, width)
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))
        return x


class GPT(nn.Module):
    """A causal language model over bytes, with learned positions."""

    def __init__(
        self, *, layers: int, width: int, heads: int, context: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self,
        tokens: Tensor,  # (batch, context) int64
        targets: Tensor | None = None,  # (batch, context) int64: the token after each
    ) -> tuple[Tensor, Tensor | None]:  # (batch, context, 256) logits, () loss in float32
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # (context,)
        x = self.dropout(self.token(tokens) + self.position(positions))  # (batch, context, width)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# --- the data


def read_corpus(limit_bytes: int) -> bytes:
    """The standard library's top-level modules, end to end in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    # _sysconfigdata*.py is not the library's source: it records how this interpreter was built.
    paths = [p for p in sorted(folder.glob("*.py")) if not p.name.startswith("_sysconfigdata")]
    if not paths:
        fail(f"no Python source in {folder}; use an interpreter that has its library's source")
    corpus = b""
    for path in paths:
        corpus += path.read_bytes()
        if len(corpus) >= limit_bytes:
            break
    return corpus[:limit_bytes]


class Windows:
    """Sequences of a text without overlap, in an order that the seed fixes, round and round."""

    def __init__(self, text: bytes, context: int, seed: int, device: torch.device) -> None:
        count = (len(text) - 1) // context  # a token's target is the one after it
        if count < 1:
            fail(
                f"got {len(text)} bytes of text, needed {context + 1} for one sequence; "
                f"raise --corpus-bytes or lower --context {context}"
            )
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)  # (bytes,)
        self.context = context
        self.device = device
        self.order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        self.position = 0  # in `order`, of the next sequence

    def draw(self, batch: int) -> tuple[Tensor, Tensor]:  # both (batch, context) int64
        """The next `batch` sequences and their targets."""
        picks = [self.order[(self.position + i) % len(self.order)] for i in range(batch)]
        self.position += batch
        rows = [self.text[i * self.context :][: self.context + 1] for i in picks]
        sequences = torch.stack(rows).long().to(self.device)  # (batch, context + 1)
        return sequences[:, :-1], sequences[:, 1:]


# --- the run


@dataclass(slots=True)
class Run:
    """All that a step changes: what a checkpoint holds."""

    identity: dict[str, str]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    windows: Windows
    step: int = 0  # steps done


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of one call of `main`, by step."""

    train: dict[int, float]
    validation: dict[int, float]


def dtype_named(name: str | None) -> Any:
    """A dtype option of `megacompile` from its name on the command line."""
    return name if name in (None, "int8") else getattr(torch, str(name))


def to_float8(model: nn.Module, recipe: str, device: torch.device) -> None:
    """Convert linear layers to torchao's, whose products are in float8; a CPU emulates those."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=device.type == "cpu")
    convert_to_float8_training(model, config=config)


def build(flags: Namespace, text: bytes, device: torch.device) -> Run:
    """The model, plain or streamed, and what trains it."""
    torch.manual_seed(flags.seed)
    gpt = GPT(
        layers=flags.layers,
        width=flags.width,
        heads=flags.heads,
        context=flags.context,
        dropout=flags.dropout,
    ).to(getattr(torch, flags.dtype))
    if flags.float8 is not None:
        to_float8(gpt.blocks, flags.float8, device)
    model: nn.Module
    if flags.plain:
        model = gpt.to(device)
    else:
        model = megacompile(
            gpt,
            device=device,
            compute_dtype=dtype_named(flags.compute_dtype),
            state_dtype=dtype_named(flags.state_dtype),
            stochastic_rounding=flags.stochastic_rounding,
        )

    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": flags.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=flags.learning_rate,
        betas=(0.9, 0.95),
    )

    def share_of_learning_rate(step: int) -> float:
        if step < flags.warmup:
            return (step + 1) / int(flags.warmup)
        progress: float = (step - flags.warmup) / max(1, flags.steps - flags.warmup)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))

    scheduler = LambdaLR(optimizer, share_of_learning_rate)
    windows = Windows(text, flags.context, flags.seed, device)
    return Run(identity(flags, text), model, optimizer, scheduler, windows)


def train_step(run: Run, flags: Namespace) -> float:
    """One optimizer step; returns the mean loss of its batches."""
    run.model.train()
    losses = []
    for _ in range(flags.accumulate):
        tokens, targets = run.windows.draw(flags.batch)
        _, loss = run.model(tokens, targets)
        (loss / flags.accumulate).backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(run.model.parameters(), flags.clip)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.scheduler.step()
    run.step += 1
    return float(torch.stack(losses).mean())


@torch.no_grad()
def validate(model: nn.Module, windows: Windows, batch: int) -> float:
    """The mean loss of the same batches each time."""
    model.eval()
    windows.position = 0
    losses = []
    for _ in range(VALIDATION_BATCHES):
        tokens, targets = windows.draw(batch)
        _, loss = model(tokens, targets)
        losses.append(loss)
    return float(torch.stack(losses).mean())


def identity(flags: Namespace, text: bytes) -> dict[str, str]:
    """The settings that a run's losses depend on: runs that agree in them can continue each
    other."""
    flags_by_name = {k: str(v) for k, v in vars(flags).items() if k not in FREE_ON_RESUME}
    return {**flags_by_name, "corpus's CRC-32": f"{zlib.crc32(text):08x}"}


def save(path: Path, run: Run) -> None:
    """Write a checkpoint; an interruption leaves the one before it whole."""
    checkpoint = {
        "identity": run.identity,
        "step": run.step,
        "position": run.windows.position,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all(),
    }
    part = path.with_name(path.name + ".part")
    torch.save(checkpoint, part)
    os.replace(part, path)


def restore(path: Path, run: Run, last: int) -> None:
    """Continue from a checkpoint of this run, short of its step `last`."""
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        there: dict[str, str] = checkpoint["identity"]
    except (EOFError, KeyError, RuntimeError, TypeError, pickle.UnpicklingError) as error:
        fail(f"--resume {path} is not a checkpoint of this program ({type(error).__name__})")
    here = run.identity
    differences = [f"{k} was {there.get(k)}, is {here[k]}" for k in here if here[k] != there.get(k)]
    if differences:
        fail(f"--resume {path} is of a run with other flags or data: {'; '.join(differences)}")
    if checkpoint["step"] >= last:
        fail(f"--resume {path} is at step {checkpoint['step']}, and the run ends at step {last}")
    run.step = checkpoint["step"]
    run.windows.position = checkpoint["position"]
    run.model.load_state_dict(checkpoint["model"])
    run.optimizer.load_state_dict(checkpoint["optimizer"])
    run.scheduler.load_state_dict(checkpoint["scheduler"])
    torch.set_rng_state(checkpoint["rng"])
    if len(checkpoint["cuda_rng"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(checkpoint["cuda_rng"])


def peak_memory(device: torch.device) -> str:
    """The most memory taken so far: on the device, or by the process where that is the host."""
    if device.type == "cuda":
        return f"peak device memory {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB"
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    return f"peak host memory {peak_bytes / 2**30:.2f} GiB"


def report(line: str) -> None:
    """Print a line above the progress bar, at once."""
    tqdm.write(line)
    sys.stdout.flush()


def train(run: Run, flags: Namespace, held_out: Windows, last: int) -> Losses:
    """The loop, from the run's step to step `last`."""
    losses = Losses({}, {})
    tokens_per_step = flags.accumulate * flags.batch * flags.context
    # disable=None: a bar on a terminal, none in a log
    with tqdm(total=last, initial=run.step, unit="step", dynamic_ncols=True, disable=None) as bar:
        while run.step < last:
            learning_rate = run.scheduler.get_last_lr()[0]
            start = time.perf_counter()
            loss = train_step(run, flags)
            rate = tokens_per_step / (time.perf_counter() - start)
            step, ends = run.step, run.step == last
            losses.train[step] = loss
            memory = peak_memory(held_out.device)
            bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s, {memory}", refresh=False)
            bar.update()
            if step % LOG_EVERY == 0 or step == 1 or ends:
                report(f"step {step:5d}   loss {loss:.8f}   lr {learning_rate:.3e}")
            if step % flags.validate_every == 0 or ends:
                losses.validation[step] = validate(run.model, held_out, flags.batch)
                report(f"step {step:5d}   validation loss {losses.validation[step]:.8f}")
            due = flags.checkpoint_every is not None and step % flags.checkpoint_every == 0
            if flags.checkpoint is not None and (due or ends):
                save(flags.checkpoint, run)
    return losses


def main(argv: Sequence[str] | None = None) -> Losses:
    """Train as the command line says (`argv`, else this process's) and return the losses."""
    flags = parse_flags(argv)
    device = flags.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    last = flags.stop_at or flags.steps
    text = read_corpus(flags.corpus_bytes)
    split = len(text) - int(len(text) * VALIDATION_SHARE)
    held_out = Windows(text[split:], flags.context, flags.seed, device)
    run = build(flags, text[:split], device)
    if flags.resume is not None:
        restore(flags.resume, run, last)

    size = sum(p.numel() for p in run.model.parameters()) / 1e6
    how = "plain" if flags.plain else "streamed"
    report(f"{size:.2f} M parameters in {flags.dtype}, {how}, on {device}")
    start, first = time.perf_counter(), run.step
    losses = train(run, flags, held_out, last)
    time_s = time.perf_counter() - start
    tokens = (last - first) * flags.accumulate * flags.batch * flags.context

    if not flags.plain:
        print(schedules(run.model)[0].table())
    rate = tokens / time_s
    print(f"{tokens:,} tokens in {time_s:.1f} s ({rate:,.0f} tokens/s), {peak_memory(device)}")
    print(f"final: loss {losses.train[last]:.8f}, validation loss {losses.validation[last]:.8f}")
    return losses


if __name__ == "__main__":
    main()
