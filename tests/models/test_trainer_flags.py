"""Flags of `Trainer` that do what megacompile does too: the plain loop's numbers, in every bit.

Skipped where accelerate is not installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megacompile import megacompile, schedules

pytest.importorskip("accelerate")

FLAGS: dict[str, dict[str, Any]] = {
    "checkpoints": {"gradient_checkpointing": True},
    "reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "autocast": {"bf16": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
}


def trained(folder: Path, flags: dict[str, Any], *, streamed: bool) -> dict[str, Any]:
    """Losses, norms of gradients and parameters of some steps."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Trainer, TrainingArguments

    config = Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    rows = [
        {"input_ids": torch.arange(i, i + 16), "labels": torch.arange(i, i + 16)} for i in range(16)
    ]
    torch.compiler.reset()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if streamed:
        megacompile(model, device="cpu", lowering="eager")
    arguments = TrainingArguments(
        str(folder), use_cpu=True, max_steps=3, per_device_train_batch_size=4, logging_steps=1,
        learning_rate=0.01, report_to=[], save_strategy="no", disable_tqdm=True, **flags,
    )  # fmt: skip
    loop = Trainer(model=model, args=arguments, train_dataset=rows)
    loop.train()
    assert not streamed or schedules(model)
    logged = [(e["loss"], e["grad_norm"]) for e in loop.state.log_history if "loss" in e]
    return {"logged": logged, "params": {n: p.detach() for n, p in model.named_parameters()}}


@pytest.mark.parametrize("flags", FLAGS)
def test_numbers_are_the_plain_ones(flags: str, tmp_path: Path) -> None:
    plain = trained(tmp_path, FLAGS[flags], streamed=False)
    ours = trained(tmp_path, FLAGS[flags], streamed=True)
    assert len(plain["logged"]) == 3 and ours["logged"] == plain["logged"]
    for name, param in plain["params"].items():
        assert torch.equal(ours["params"][name], param), name
