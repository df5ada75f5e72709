"""What the sum of gradients over replicas costs: ranks of other hosts have the same rows (HSDP)."""

from __future__ import annotations

import functools
import json
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest

from megacompile.cli import main

GPUS = 2
SLOW_GB_S = 1e-4
BYTES = 4  # of a gradient


@functools.cache
def planned(hosts: int, network: float | None = None) -> Any:
    """What `plan` gives for a model that two GPUs of each host share."""
    command = ["plan", "tests.configs:tower", "--batch", "2", "--seq", "16", "--json"]
    command += ["--gpus", str(GPUS), "--hosts", str(hosts)]
    shown = StringIO()
    with redirect_stdout(shown):
        assert main(command + ([] if network is None else ["--network", str(network)])) == 0
    return json.loads(shown.getvalue())


@pytest.mark.parametrize("hosts", [2, 4])
def test_each_rank_sums_its_part_with_those_that_have_it_too(hosts: int) -> None:
    alone, several = planned(1), planned(hosts, SLOW_GB_S)
    part_bytes = BYTES * alone["active_parameters"] / GPUS
    more_s = several["step_s"] - alone["step_s"]
    expected_s = 2 * (hosts - 1) / hosts * part_bytes / (SLOW_GB_S * 1e9)
    assert more_s == pytest.approx(expected_s, rel=0.1)
    assert several["plan"]["replicas"] == several["hosts"] == hosts
    assert several["tokens_per_s"] == pytest.approx(hosts * GPUS * 32 / several["step_s"])


def test_a_network_is_among_what_bounds_a_step() -> None:
    bounds = planned(2, SLOW_GB_S)["plan"]["bounds"]
    assert next(iter(bounds)) == "network" and bounds["network"] > 0.5
    assert planned(2)["plan"]["bounds"]["network"] < 0.05
    assert "network" not in planned(1)["plan"]["bounds"]


def test_what_is_assumed_is_said() -> None:
    assumed = planned(2)
    given = planned(2, assumed["plan"]["network_gb_s"])
    assert assumed["step_s"] == pytest.approx(given["step_s"])
    assert assumed["plan"]["network_is_assumed"] and not given["plan"]["network_is_assumed"]
