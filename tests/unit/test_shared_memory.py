"""Inputs of a call that share memory: moved together, and known to overlap."""

from __future__ import annotations

import torch
from torch import Tensor

from megacompile.runtime.params.shared_memory import moved, moved_together, overlaps


def text(seed: int = 0) -> Tensor:
    return torch.randint(12, (4, 9), generator=torch.Generator().manual_seed(seed))


def test_inputs_move_together_and_stay_what_they_are() -> None:
    """To the device; here: they are copied. Tensors that overlap, or are the same, or appear
    twice, do so there, too; gradients flow back; nothing else of their memory comes along."""
    here = text()
    tokens, labels, other = moved_together([here[:, :-1], here[:, 1:], text(1)], torch.clone)
    labels.fill_(5)
    assert (tokens[:, 1:] == 5).all() and not (here == 5).all()
    assert torch.equal(other, text(1)) and tokens.shape == labels.shape == (4, 8)

    x, stays = torch.ones(3), torch.zeros(3)
    around, beside = {"x": [x, stays]}, [stays]
    given, named = (x, around, beside), {"labels": x}
    args, kwargs = moved(given, named, lambda t: t is stays, lambda t: t if t is stays else t + 1)
    assert args[0] is args[1]["x"][0] is kwargs["labels"] and args[0] is not x
    assert args[1]["x"][1] is stays and args[2] is beside, "only what moves is another one"
    assert around["x"][0] is x, "the caller's is as it was"

    moves = list[int]()

    def noted(tensor: Tensor) -> Tensor:
        moves.append(tensor.numel())
        return tensor.clone()

    memory = torch.zeros(1000 * 101)
    for start in range(0, 1000, 9):  # a table may begin at any address
        table = memory[start : start + 1000 * 100].view(100, 1000)
        moves.clear()
        moved_together([table[:, 0], table[:, 7], table[:, 20:30]], noted)
        assert sorted(moves) == [100, 100, 1000], start

    root = torch.ones(3, 4, requires_grad=True)
    left, right = moved_together([root[:, :3], root[:, 1:]], torch.clone)
    (left.sum() + 2 * right.sum()).backward()
    assert root.grad is not None
    assert torch.equal(root.grad, torch.tensor([1.0, 3.0, 3.0, 2.0]).expand(3, 4))

    halves = [here[:, :-1], here[:, 1:]]
    assert all(a is b for a, b in zip(halves, moved_together(halves, lambda t: t), strict=True))


def test_overlaps_are_those_of_what_is_changed() -> None:
    tokens, x = text(), torch.ones(4)
    args = [tokens[:, :-1], x, tokens[:, 1:], x[:2]]
    (found,) = overlaps(args, frozenset({2}), [])
    assert found.members == ((0, 0), (2, 1)) and found.numel == 36
    assert overlaps(args, frozenset(), []) == ()
    assert [found.members for found in overlaps(args, frozenset({3}), [])] == [((3, 0), (1, 0))]
