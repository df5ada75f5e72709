"""Parameters that moved to buckets take their memory once."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
import torch
from pathlib import Path
from torch import nn
from megacompile import megacompile

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmRSS:")) * 1024

megacompile(nn.Linear(8, 8), device="cpu", progress=False)  # imports
torch.zeros(2**23 - 2**10)  # malloc's threshold rises when a mapping is freed
before = resident()
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(64)))
size = sum(p.nbytes for p in model.parameters())
megacompile(model, device="cpu", progress=False)
print((resident() - before) / size)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about the GNU C library's malloc")
def test_what_parameters_leave_goes_back_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=300
    )
    assert float(done.stdout) < 1.3
