"""Random initialisation of models on meta: the numbers, and who gets none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import HostMemoryError, ModelError, megacompile
from megacompile.runtime.checkpoint.memory import is_unset, mark_unset
from tests.checkpoints import Net, ids, on_meta, same, values

transformers = pytest.importorskip("transformers")


def seeded(model: nn.Module) -> Any:
    torch.manual_seed(5)
    return megacompile(model)


def built(make: Any = Net) -> Any:
    torch.manual_seed(5)
    return make()


def test_numbers_are_those_of_the_constructor_where_it_draws_in_resets_alone() -> None:
    plain, model = built(lambda: Net(tied=False)), seeded(on_meta(tied=False))
    assert same(values(plain), values(model)) == []
    after = torch.rand(1)
    built(lambda: Net(tied=False))
    assert torch.equal(torch.rand(1), after)  # as many were drawn
    assert torch.equal(plain(ids()), model(ids()))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.recurrent = nn.LSTM(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.convolution = nn.Conv1d(8, 8, 3)
        self.bilinear = nn.Bilinear(2, 3, 4)


def test_modules_of_torch() -> None:
    assert same(values(built(Attention)), values(seeded(on_meta(Attention)))) == []


def configs() -> dict[str, Any]:
    common = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "use_cache": False}
    return {
        "qwen2": transformers.Qwen2Config(
            **common, intermediate_size=32, num_hidden_layers=2, num_key_value_heads=1
        ),
        "tied": transformers.Qwen2Config(
            **common,
            intermediate_size=32,
            num_hidden_layers=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        ),
        "gpt2": transformers.GPT2Config(
            vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, use_cache=False
        ),
        "yarn": transformers.LlamaConfig(
            **common,
            intermediate_size=32,
            num_hidden_layers=1,
            rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
        ),
        "mixtral": transformers.MixtralConfig(
            **common,
            intermediate_size=32,
            num_hidden_layers=1,
            num_key_value_heads=1,
            num_local_experts=2,
        ),
    }


def from_config(config: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))


@pytest.mark.parametrize("name", ["qwen2", "tied", "gpt2", "yarn", "mixtral"])
def test_models_of_transformers(name: str) -> None:
    """As `to_empty` and `initialize_weights`; buffers as in a model that was built in memory."""
    config = configs()[name]
    plain = from_config(config)
    reference = on_meta(from_config, config=config).to_empty(device="cpu")
    reference.tie_weights()
    torch.manual_seed(5)
    reference.initialize_weights()
    model = seeded(on_meta(from_config, config=config))
    params = dict(reference.named_parameters())
    assert same(params, dict(model.named_parameters())) == []
    assert same(dict(plain.named_buffers()), dict(model.named_buffers())) == []
    assert not any(hasattr(param, "_is_hf_initialized") for param in model.parameters())
    plain.load_state_dict(model.state_dict())
    tokens = torch.arange(8)[None]
    plain.eval(), model.eval()  # GPT-2 has dropout
    expected = plain(input_ids=tokens, labels=tokens).loss
    assert torch.equal(expected, model(input_ids=tokens, labels=tokens).loss)


@pytest.mark.parametrize("name", ["tied", "gpt2"])
def test_a_model_that_was_moved_to_meta_is_tied_again(name: str) -> None:
    """`to` makes parameters of their own of tied ones; and its modules say that they are done."""
    model = from_config(configs()[name]).to("meta")
    first, second = model.get_input_embeddings(), model.get_output_embeddings()
    seeded(model)
    assert second.weight is first.weight
    assert same(values(seeded(on_meta(from_config, config=configs()[name]))), values(model)) == []


class Titan(nn.Module):
    """`init_weights` of the outermost, which makes a buffer anew and a parameter too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(4, dtype=torch.complex64), persistent=False)

    def init_weights(self, device: torch.device | None = None) -> None:
        nn.init.trunc_normal_(self.inner.weight)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.table = torch.polar(torch.ones(4), torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) * self.scale * self.table.real
        return result


def test_init_weights_of_the_outermost_module() -> None:
    model = on_meta(Titan)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seeded(model)
    assert model.scale is optimizer.param_groups[0]["params"][0]
    assert model.scale.tolist() == [2.0] * 4
    assert torch.equal(model.table, torch.polar(torch.ones(4), torch.arange(4.0)))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert model.scale.tolist() != [2.0] * 4


class Lost(nn.Module):
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gamma = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(4), persistent=False)


class Half(Lost):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.gamma[:3] = 1
            self.mask.fill_(1)


class Stray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.table = torch.arange(4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Lost, r"2 tensors of Lost were on meta and get no values: gamma, mask; needed a checkp"),
        (Half, r"1 tensors of Half were on meta and get no values: gamma; .*reset_parameters\(\)"),
        (Stray, r"Stray.table is a tensor on meta, and neither .* make it with device='cpu'"),
    ],
)
def test_what_nobody_initialises_is_named(make: Any, message: str) -> None:
    model = on_meta(make)
    with pytest.raises(ModelError, match=message):
        megacompile(model)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_a_part_may_be_in_memory() -> None:
    model = on_meta(Lost)
    model.gamma = nn.Parameter(torch.full((4,), 3.0))
    model.mask = torch.ones(4)
    gamma = model.gamma
    seeded(model)
    assert model.gamma is gamma and gamma.tolist() == [3.0] * 4
    torch.manual_seed(5)
    assert torch.equal(model.inner.weight, nn.Linear(4, 4).weight)


def test_memory_is_checked_before_anything_is_made() -> None:
    model = on_meta(lambda: nn.Linear(2**20, 2**20))  # 4 TiB
    with pytest.raises(HostMemoryError, match="parameters to move to the host"):
        megacompile(model)
    assert model.weight.is_meta


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64]
    + [torch.uint8, torch.bool, torch.float8_e4m3fn],
)
def test_what_is_unset_is_seen(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5, dtype=dtype)
    assert not is_unset(tensor)
    mark_unset(tensor)
    assert is_unset(tensor)
    tensor.view(torch.uint8).fill_(0)
    assert not is_unset(tensor)
    if dtype.is_floating_point and dtype.itemsize > 1:
        tensor[:] = float("inf")
        tensor[0, 0] = -float("inf")
        assert not is_unset(tensor)
        tensor[0, 1] = float("nan")
        assert not is_unset(tensor)
        mark_unset(tensor[2])
        assert is_unset(tensor)
    assert not is_unset(torch.empty(0, dtype=dtype))
