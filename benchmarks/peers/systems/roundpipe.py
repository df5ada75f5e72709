"""RoundPipe: stages in page-locked host memory, uploaded for each pass; the update on the CPU.

It has presets for other models than Qwen2; this one goes in as an `nn.Sequential` of its layers, as
RoundPipe documents for any model, with RoundPipe's own chunked loss. A batch is two micro-batches,
its default on one GPU. `stale` is its default: the update runs beside the next step, which computes
with weights that are one step old. Without it each step waits for its update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.system import System, module
from benchmarks.peers.work import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY

MICRO_BATCHES = 2

Values = tuple[Tensor, Tensor, Tensor, Tensor]  # hidden, cosine, sine, labels


class _First(nn.Module):
    """Ids to the first layer's input: (batch, length) -> (batch, length, width) and so on."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.embed, self.rotary = decoder.embed_tokens, decoder.rotary_emb

    def forward(self, ids: Tensor) -> Values:
        hidden = self.embed(ids)
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        cosine, sine = self.rotary(hidden, positions)
        return hidden, cosine, sine, ids


class _Layer(nn.Module):
    """One decoder layer; attention without a mask is causal."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, values: Values) -> Values:
        hidden, cosine, sine, labels = values
        out = self.layer(hidden, attention_mask=None, position_embeddings=(cosine, sine))
        return out[0] if isinstance(out, tuple) else out, cosine, sine, labels


class _Last(nn.Module):
    """The loss of the next tokens, in chunks, as RoundPipe's presets compute it."""

    def __init__(self, model: Any, loss: Any) -> None:
        super().__init__()
        self.norm, self.head, self.loss = model.model.norm, model.lm_head, loss

    def forward(self, values: Values) -> Tensor:
        hidden, _, _, labels = values
        result: Tensor = self.loss(self.norm(hidden), self.head, labels)
        return result


def stages(model: Any, loss: Any) -> nn.Sequential:
    """A causal language model as layers one behind the other: (batch, length) ids -> () loss."""
    middle = (_Layer(layer) for layer in model.model.layers)
    return nn.Sequential(_First(model.model), *middle, _Last(model, loss))


def setup(model: nn.Module, device: str, *, stale: bool = False) -> System:
    """Train a `Loss`.

    Args:
        model: in host memory, bf16.
        device: "cuda".
        stale: RoundPipe's asynchronous update.
    """
    roundpipe: Any = module("roundpipe")
    chunked = module("roundpipe.models.function").ChunkedCompileLinearForCausalLMLoss
    inner: Any = model
    piped = roundpipe.RoundPipe(stages(inner.model, chunked), optim_dtype=torch.float32)
    optimizer = roundpipe.optim.Adam(
        piped.optim_parameters(),
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        decoupled_weight_decay=True,
    )

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    def step(ids: Tensor) -> Tensor:
        count = min(MICRO_BATCHES, ids.shape[0])
        loss: Tensor = piped.forward_backward(
            input_args=(ids.cpu(),),
            loss_fn=lambda out, _: out / count,
            run_config=roundpipe.RoundPipeRunConfig(num_microbatch=count),
        )
        piped.step(update, is_async=stale)
        return loss.detach()

    return System(step, piped.synchronize)
