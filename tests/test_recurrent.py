"""nn.LSTM and its like: not captured, and the same numbers, whatever Dynamo is told of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from megacompile import compat
from tests.zoo import WIDTH, assert_steps_same, equal, twins

pytestmark = pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True),
    "GRU": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "RNN": lambda: nn.RNN(WIDTH, WIDTH, bias=False, batch_first=True),
    "both ways": lambda: nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(WIDTH, 2 * WIDTH, proj_size=WIDTH, batch_first=True),
}


class Recurrent(nn.Module):
    """A recurrent layer between two that are captured; packed where it gets lengths."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = layer
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        hidden = self.first(x)
        if lengths is None:
            hidden, _ = self.layer(hidden)
        else:
            packed = pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
            hidden, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        result: Tensor = self.last(hidden).square().mean()
        return result


@pytest.fixture(autouse=True)
def told_to_capture() -> Iterator[None]:
    """The user has set Dynamo's own option for such layers."""
    before = compat.dynamo_options()
    compat.set_dynamo_options({"allow_rnn": True})
    yield
    compat.set_dynamo_options(before)


@pytest.mark.parametrize("name", LAYERS)
def test_training_and_evaluation(name: str) -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Recurrent(LAYERS[name]()))
    x = torch.randn(2, 5, WIDTH)
    assert_steps_same(plain, streamed, {"x": x})
    for model in (plain, streamed):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.eval()
    with torch.no_grad():
        assert equal(plain(x), streamed(x))


def test_packed_sequences() -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Recurrent(LAYERS["LSTM"]()))
    for lengths in ([5, 3], [2, 4]):
        inputs = {"x": torch.randn(2, 5, WIDTH), "lengths": torch.tensor(lengths)}
        assert_steps_same(plain, streamed, inputs)


def test_the_layer_is_itself_behind_a_call() -> None:
    plain, streamed = twins(Recurrent(LAYERS["GRU"]()))
    x = torch.randn(2, 5, WIDTH)
    streamed(x)
    assert equal(streamed.layer(x)[0], plain.layer(x)[0])
    assert [*map(id, streamed.layer.all_weights[0])] == [*map(id, streamed.layer.parameters())]
