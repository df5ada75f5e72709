"""The cost of generation next to the plain model: tokens of a small Qwen2, with two kinds of
caches.

    python -m benchmarks.generate --tokens 48 --cache static --cache growing

Each call generates the same greedy tokens, which must be those of the plain model. "first" is the
first call, which captures and compiles. The others alternate with calls of the plain model, so that
a machine that is busy with something else is so for both: "ratio" is the median of the ratios of
neighbours, "least" that of the two shortest times. Times are in seconds of the whole call. On a GPU
the model is one of `--layers` of Qwen2.5-7B's width with `--width 3584`, and "plain" is on the GPU.
`--gpu-memory` bounds what megacompile may use there.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import megacompile
from benchmarks.report import publish

_CACHES: dict[str, dict[str, Any]] = {
    "static": {"cache_implementation": "static", "disable_compile": True},
    "growing": {},
}


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--tokens", type=int, default=48, help="new ones")
    parser.add_argument("--calls", type=int, default=7, help="of each, behind the first")
    parser.add_argument("--cache", action="append", choices=sorted(_CACHES), help="default: static")
    parser.add_argument("--attention", default="sdpa", help="sdpa or eager; default: sdpa")
    parser.add_argument("--lowering", help="eager or inductor; default: that of the device")
    parser.add_argument("--slots", type=int, help="default: what the plan finds")
    parser.add_argument("--gpu-memory", help="default: what is free")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    plain = _model(args)
    options = {"lowering": args.lowering, "slots": args.slots, "gpu_memory": args.gpu_memory}
    model = megacompile.megacompile(
        copy.deepcopy(plain), device=args.device, progress=False, **options
    )
    plain.to(args.device)
    rows = [_row(args, cache, plain, model) for cache in args.cache or ["static"]]
    publish("Generation", rows, args.out)
    return rows


def _model(args: argparse.Namespace) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=args.width,
        intermediate_size=18944 if args.width == 3584 else 2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=max(4, args.width // 128),
        num_key_value_heads=4 if args.width == 3584 else 2,
        vocab_size=152064 if args.width == 3584 else 256,
        max_position_embeddings=4096,
        attn_implementation=args.attention,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if args.device != "cpu" else torch.float32
    return Qwen2ForCausalLM(config).to(dtype).eval()


def _row(
    args: argparse.Namespace, cache: str, plain: nn.Module, model: nn.Module
) -> dict[str, object]:
    torch.manual_seed(1)
    ids = torch.randint(0, 256, (1, args.prompt), device=args.device)
    generate = {"max_new_tokens": args.tokens, "do_sample": False, "pad_token_id": 0}
    generate |= {"eos_token_id": None, **_CACHES[cache]}

    def call(of: Any) -> tuple[float, torch.Tensor]:
        begin = time.perf_counter()
        found = of.generate(ids, **generate).cpu()
        return time.perf_counter() - begin, found

    want = call(plain)[1]
    first, got = call(model)
    second, _ = call(model)
    pairs = [(call(plain)[0], call(model)[0]) for _ in range(args.calls)]
    return {
        "cache": cache,
        "layers": args.layers,
        "width": args.width,
        "tokens": args.tokens,
        "equal": bool(torch.equal(want, got)),
        "first s": f"{first:.2f}",
        "second s": f"{second:.2f}",
        "plain s": f"{min(p for p, _ in pairs):.3f}",
        "megacompile s": f"{min(m for _, m in pairs):.3f}",
        "ratio": f"{statistics.median(m / p for p, m in pairs):.2f}",
        "least": f"{min(m for _, m in pairs) / min(p for p, _ in pairs):.2f}",
        "schedules": len(megacompile.schedules(model)),
    }


if __name__ == "__main__":
    main()
