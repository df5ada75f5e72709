"""Small models, and uses of a plain model and of its streamed twin with all that can be seen."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megacompile import megacompile
from tests.zoo import assert_same, equal


class Applies(nn.Module):
    """Modules, parameters and buffers by name; the function is given the model, too."""

    def __init__(self, function: Callable[..., Any], **named: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in named.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.function(self, *args, **named)


def in_a_row(function: Callable[..., Any], *, count: int = 2, width: int = 4, **named: Any) -> Any:
    """Linear layers of one width: `first`, `last` and, of three, `middle`; the same each time."""
    torch.manual_seed(0)
    names = ("first", "last", "middle")[:count]
    layers = {name: nn.Linear(width, width) for name in names}
    return Applies(function, **layers, **named)


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def flat(logits: Any, ids: Any, **options: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), **options)


def streamed(model: Any, **options: Any) -> Any:
    """Megacompiled for the CPU, in the plain model's bits."""
    return megacompile(model, device="cpu", lowering="eager", progress=False, **options)


def from_config(name: str, **changes: Any) -> Any:
    """A tiny model of transformers, without values where the default device is meta."""
    import transformers

    small: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2}
    small |= {"intermediate_size": 32, "num_hidden_layers": 2, "use_cache": False}
    grouped = {**small, "num_key_value_heads": 1}
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    gpt2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "use_cache": False}
    kind, given = {
        "qwen2": (transformers.Qwen2Config, grouped),
        "tied": (transformers.Qwen2Config, {**grouped, "tie_word_embeddings": True}),
        "yarn": (transformers.LlamaConfig, {**small, "rope_parameters": yarn}),
        "mixtral": (transformers.MixtralConfig, {**grouped, "num_local_experts": 2}),
        "mistral": (transformers.MistralConfig, {**grouped, "sliding_window": 8}),
        "gpt2": (transformers.GPT2Config, {**gpt2, "n_positions": 32}),
    }[name]
    return transformers.AutoModelForCausalLM.from_config(kind(**{**given, **changes}))


@contextmanager
def said(words: str = "megacompile") -> Iterator[list[str]]:
    """The warnings of a block that have these words in them, once it has ended."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if words in str(w.message)]


Pairs = Iterable[tuple[Any, Any]]  # of models with their optimizers


def with_adamw(models: Iterable[Any]) -> list[tuple[Any, Any]]:
    return [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in models]


def train(
    pairs: Pairs, loss: Callable[[Any, int], Tensor], seeds: Iterable[int] = range(3)
) -> None:
    """A step for each seed: the losses of a model and a seed are equal, and so is what is left."""
    for seed in seeds:
        losses = []
        for model, optimizer in pairs:
            torch.manual_seed(seed)
            losses.append(loss(model, seed))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert equal(*(each.detach() for each in losses)), seed
    assert_same(*(model for model, _ in pairs))


Use = Callable[[Any], Any]  # of a model: gives what it has seen


def leaves(value: Any) -> list[Any]:
    """What is in nested containers and dataclasses, in order."""
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return tree_leaves(value)


def assert_alike(models: Any, use: Use, *, times: int = 1, name: str = "") -> None:
    """Both show the same bits, and end with the same parameters, gradients and buffers."""
    for i in range(times):
        found = []
        for model in models:
            torch.manual_seed(i)
            seen = use(model)
            found.append([type(seen), *leaves(seen)])
        assert len(found[0]) == len(found[1]), name
        for mine, theirs in zip(*found, strict=True):
            if isinstance(mine, Tensor):
                assert equal(mine.detach(), theirs.detach()), name
            else:
                assert mine == theirs, name
        assert_same(*models)


def total(output: Any) -> Tensor:
    """A loss that gives each element in an output that requires grad another gradient."""
    sums = [torch.zeros(())]
    for each in leaves(output):
        if isinstance(each, Tensor) and each.requires_grad:
            real = torch.view_as_real(each.resolve_conj()) if each.is_complex() else each
            weights = torch.arange(1.0, real.numel() + 1).reshape(real.shape) / real.numel()
            sums.append((real * weights).tanh().sum())
    return torch.stack(sums).sum()


def trained(*inputs: Any, **named: Any) -> Use:
    """A forward and a backward of a loss of everything in the output."""

    def use(model: Any) -> Any:
        output = model(*inputs, **named)
        loss = total(output)
        if loss.requires_grad:
            loss.backward()
        return output

    return use


@torch.library.custom_op("megacompile_tests::real_only", mutates_args=())
def real_only(x: Tensor) -> Tensor:
    """Has no fake kernel."""
    return x.clone()


@real_only.register_fake
def _(x: Tensor) -> Tensor:
    raise RuntimeError("no fake tensors here")


@torch.library.custom_op("megacompile_tests::sized_gradient", mutates_args=())
def sized_gradient(x: Tensor) -> Tensor:
    return x * 2


@sized_gradient.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((int(x.shape[0]), *x.shape[1:]))  # it asks for the size


@torch.library.custom_op("megacompile_tests::asks_in_backward", mutates_args=())
def asks_in_backward(x: Tensor) -> Tensor:
    """Its backward asks for a size."""
    return x * 2


asks_in_backward.register_fake(torch.empty_like)
asks_in_backward.register_autograd(lambda _, gradient: sized_gradient(gradient))
