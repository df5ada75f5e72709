"""The C++ of an update is compiled by a process beside this one; until then torch makes it.

Scripts stand in for the process; tests/models/test_compiled_updates.py has a real one.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, RMSprop

from megacompile import megacompile
from tests import inside
from tests.zoo import uncompiled

FOREVER = "exec sleep 1000"
DTYPE = torch.float16  # of its own, as what there is already is not asked for again
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs sh")


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Call it with what each process does, a line of sh. Inductor's caches are empty, and stages
    are graphs as they are."""
    script = tmp_path / "python"

    def does(line: str) -> None:
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    does(FOREVER)
    # Inductor would start the script, too: to compile kernels, and to try vector instructions.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", lambda: [])
    monkeypatch.setattr(torch._inductor, "compile", uncompiled)
    gc.collect(1)  # optimizers of other tests
    with torch._inductor.config.patch(compile_threads=1):
        yield does
    for each in processes():
        each.kill()


def processes() -> list[psutil.Process]:
    """Those that this one has started, and that are not over."""
    found = psutil.Process().children()
    return [each for each in found if each.status() != psutil.STATUS_ZOMBIE]


def trained(make: Callable[[nn.Module], Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """A small model and its optimizer, which is given to megacompile() if `options` have one."""
    model = nn.Linear(4, 4).to(DTYPE)
    optimizer = make(model)
    given = {"lowering": "inductor", **options}
    if "optimizer" in options:
        given["optimizer"] = optimizer
    return megacompile(model, device="cpu", progress=False, **given), optimizer


def backward(model: Any) -> None:
    model(torch.ones(2, 4, dtype=DTYPE)).sum().backward()


def test_a_process_that_refuses_is_believed(beside: Callable[[str], None]) -> None:
    """Torch makes the update for good; that is said once, with the compiler's reason."""
    beside("echo 'no compiler here' >&2; exit 3")
    inside.say_again()
    model, optimizer = trained(lambda model: AdamW(model.parameters()), {})

    def step() -> None:
        backward(model)
        optimizer.step()
        assert inside.backends(model) == {"torch"}

    with pytest.warns(UserWarning, match="compiler") as said:
        step()
        until_s = time.monotonic() + 60
        while processes() and time.monotonic() < until_s:
            time.sleep(0.01)
        step()
    assert sum("compiler here" in str(each.message) for each in said) == 1
    beside(FOREVER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    assert processes() == [], "nobody is asked again"


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any], list[str]]] = {
    "amsgrad": (
        lambda model: AdamW(model.parameters(), amsgrad=True),
        {"state_dtype": torch.bfloat16},
        ["adam"],
    ),
    "plain": (lambda model: SGD(model.parameters(), lr=0.1), {}, ["sgd"]),
    "of no rule": (lambda model: RMSprop(model.parameters()), {}, []),
    "in the backward": (lambda model: AdamW(model.parameters()), {"optimizer": None}, []),
    "eager": (lambda model: AdamW(model.parameters()), {"lowering": "eager"}, []),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_it_begins_when_the_first_backward_is_planned(
    case: str, beside: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """For the optimizer that there is, before it steps; and the step asks for nothing else."""
    make, options, rules = OPTIMIZERS[case]
    model, optimizer = trained(make, options)
    with caplog.at_level("INFO", "megacompile.compile"):
        with torch.no_grad():
            model(torch.ones(2, 4, dtype=DTYPE))
        assert begun(caplog) == []
        backward(model)
        assert begun(caplog) == rules
        for each in processes():
            assert os.getpgid(each.pid) == each.pid != os.getpgid(0), "Ctrl-C is not for it"
        optimizer.step()
        assert begun(caplog) == rules


def begun(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The rules that a process compiles."""
    said = [text for text in caplog.messages if "in the background" in text]
    return [text.partition(":")[0] for text in said if "to C++" in text]
