"""Ranks build a model on meta, and each reads its rows of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megacompile import save
from tests import processes
from tests.rank_meta import MB, Large

TIMEOUT_S = 200
REFS = Path("/proc/self/clear_refs")


@pytest.mark.skipif(not REFS.exists(), reason="needs the peak of a process, from Linux")
def test_ranks_read_their_rows_and_the_host_holds_one_model(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    torch.manual_seed(0)
    model = Large()
    torch.nn.init.normal_(model.mean)
    save(model, tmp_path / "checkpoint", max_shard_size="60MB")
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 2
    processes.torchrun("tests.rank_meta", str(tmp_path), ranks=2, timeout_s=TIMEOUT_S)
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    for found in ranks:
        assert found["params"].keys() == {name for name, _ in model.named_parameters()}
        for name, param in model.named_parameters():
            assert found["params"][name].equal(param), name
        assert found["mean"].equal(model.mean)
    size = sum(param.nbytes for param in model.parameters())
    assert size > 200 * MB - 1
    peaks = [found["peak"] for found in ranks]
    assert all(0.4 * size < peak < 0.6 * size for peak in peaks), (peaks, size)
    assert sum(peaks) < size + 25 * MB, (peaks, size)
