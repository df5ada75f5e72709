"""The loops of other packages: Trainer, Accelerate, Lightning.

Each rank trains a model on rows of its own, once in each way:

    plain            without megacompile
    ddp              megacompiled; the loop puts a DistributedDataParallel around it
    mesh             ranks share it, and nothing else of the loop changes
    model parallel   the same with Lightning's strategy of that name, which makes the mesh
    saves            ranks share a language model; the loop saves it after `SAVED` steps
    resumes          another one, of other values, goes on from that

On GPUs the last two are run alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megacompile import megacompile, schedules
from tests.equality.nets import from_config
from tests.ranks.here import Check, Here, Values, differing, same_in_all, whole

STEPS, SAVED = 4, 2
MICRO = 2  # batches of a step
WIDTH = 8
WORLD = 2
LR = 0.01
HEAD = "lm_head.weight"  # another name of the embedding


class Rows(Dataset[dict[str, Tensor]]):
    """64 rows of random numbers and a label."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(WIDTH, generator=generator),
            "labels": torch.randint(0, 4, (), generator=generator),
        }


class Tokens(Rows):
    """64 rows of 8 tokens, which repeat after `period` rows."""

    def __init__(self, period: int) -> None:
        self.period = period

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index % self.period)
        tokens = torch.randint(0, 32, (8,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class Classifier(nn.Module):
    """Gives its loss, as models of `transformers` do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.relu(layer(x))
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Normed(Classifier):
    """Has buffers, which a DistributedDataParallel sends from the first rank to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().forward(self.norm(x), labels)


def tied() -> Any:
    """A language model whose head is its embedding, and which has buffers."""
    return from_config("tied", vocab_size=33)  # which two ranks divide unequally


def is_shared(model: nn.Module) -> bool:
    return any(hasattr(param, "full_tensor") for param in model.parameters())


def values(model: nn.Module) -> Values:
    """All parameters and buffers that are saved: a collective."""
    return {name: whole(value) for name, value in model.state_dict().items()}


@dataclass
class Job:
    way: str
    model: Any
    data: Rows
    folder: Path
    device: str
    losses: list[float] = field(default_factory=list)
    saved: Values = field(default_factory=dict)  # when it was saved
    values: Values = field(default_factory=dict)  # in the end
    states: list[Values] = field(default_factory=list)

    @property
    def saves(self) -> bool:
        """Or it has no files at all."""
        return self.way in ("saves", "resumes")

    def look(self) -> None:
        """Now it is saved: a collective."""
        if self.way == "saves" and not self.saved:
            self.saved = values(self.model)


def trainer(job: Job) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Look(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == SAVED:
                job.look()

    arguments = TrainingArguments(
        output_dir=str(job.folder / "out"),
        use_cpu=job.device == "cpu",
        ddp_backend="gloo" if job.device == "cpu" else None,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=MICRO,
        max_steps=STEPS,
        save_strategy="steps" if job.saves else "no",
        save_steps=SAVED,
        logging_steps=1,
        report_to=[],
        learning_rate=LR,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    loop = Trainer(model=job.model, args=arguments, train_dataset=job.data, callbacks=[Look()])
    from_there = str(job.folder / "out" / f"checkpoint-{SAVED}")
    loop.train(resume_from_checkpoint=from_there if job.way == "resumes" else None)
    job.losses = [entry["loss"] for entry in loop.state.log_history if "loss" in entry]
    if job.way == "saves":
        loop.save_model(str(job.folder / "model"))
    return loop.optimizer


def accelerate(job: Job) -> Any:
    """A loop with an `Accelerator`, by all of its ways to save and load."""
    from accelerate import Accelerator  # type: ignore[import-not-found,unused-ignore]

    accelerator = Accelerator(cpu=job.device == "cpu", gradient_accumulation_steps=MICRO)
    optimizer: Any = torch.optim.AdamW(job.model.parameters(), lr=LR)
    model, optimizer, data = accelerator.prepare(
        job.model, optimizer, DataLoader(job.data, batch_size=4)
    )
    first = MICRO * SAVED if job.way == "resumes" else 0
    if first:
        accelerator.load_state(str(job.folder / "state"))
    for number, batch in enumerate(data):
        if number < first:
            continue
        if number == MICRO * SAVED and job.way == "saves":
            job.look()
            accelerator.save_state(str(job.folder / "state"))
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        job.losses.append(loss.item())
    if job.way == "saves":
        accelerator.save_model(model, str(job.folder / "model"))
        accelerator.unwrap_model(model).save_pretrained(
            str(job.folder / "pretrained"),
            is_main_process=accelerator.is_main_process,
            state_dict=accelerator.get_state_dict(model),
        )
    accelerator.free_memory()
    return optimizer.optimizer


def lightning(job: Job) -> Any:
    """`Trainer` of Lightning, which saves by a `ModelCheckpoint`."""
    import lightning as library  # type: ignore[import-not-found,unused-ignore]
    from lightning.pytorch.callbacks import (  # type: ignore[import-not-found,unused-ignore]
        ModelCheckpoint,
    )
    from lightning.pytorch.strategies import (  # type: ignore[import-not-found,unused-ignore]
        ModelParallelStrategy,
    )

    class Module(library.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def configure_model(self) -> None:
            if job.way == "model parallel" and not is_shared(self.model):
                megacompile(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            if self.global_step == SAVED:
                job.look()
            loss: Tensor = self.model(**batch)["loss"]
            job.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    out = job.folder / "out"
    checkpoints = ModelCheckpoint(out, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    parallel = ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1)
    loop = library.Trainer(
        accelerator=job.device,
        strategy=parallel if job.way == "model parallel" else "ddp",
        devices=WORLD,
        max_steps=STEPS,
        accumulate_grad_batches=MICRO,
        gradient_clip_val=0.1,
        logger=False,
        callbacks=[checkpoints] if job.saves else [],
        enable_checkpointing=job.saves,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    sampler: Any = DistributedSampler(job.data, WORLD, int(os.environ["RANK"]), shuffle=False)
    data = DataLoader(job.data, batch_size=4, sampler=sampler)
    resumed = out / f"step={SAVED}.ckpt" if job.way == "resumes" else None
    loop.fit(Module(), data, ckpt_path=resumed, weights_only=False)
    return loop.optimizers[0]


LOOPS: dict[str, Callable[[Job], Any]] = {
    "trainer": trainer,
    "accelerate": accelerate,
    "lightning": lightning,
}


def made(name: str, way: str, here: Here) -> Job:
    torch.manual_seed(way == "resumes")
    if way in ("saves", "resumes"):  # who resumes in Lightning begins at the first batch
        data = Tokens(2 if name == "lightning" else 64)
        job = Job(way, tied(), data, here.folder, here.device)
    else:
        model = Normed() if name == "lightning" else Classifier()
        job = Job(way, model, Rows(), here.folder, here.device)
    if way in ("mesh", "saves", "resumes"):
        megacompile(job.model, mesh=here.mesh)
    elif way == "ddp":
        megacompile(job.model)
    return job


def run(name: str, way: str, here: Here) -> Job:
    """A loop, and what it leaves."""
    job = made(name, way, here)
    optimizer = LOOPS[name](job)
    assert is_shared(job.model) == (way not in ("plain", "ddp"))
    assert way == "plain" or schedules(job.model)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    job.states = [{k: whole(v) for k, v in optimizer.state[p].items()} for p in params]
    job.values = values(job.model)
    return job


def check(name: str) -> Check:
    """It trains as without megacompile, and resumes from what it saves in every bit."""

    def trains_and_resumes(here: Here) -> None:
        if here.device == "cuda":
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
            torch.use_deterministic_algorithms(True)
        else:
            plain = run(name, "plain", here)
            for way in ("ddp", "mesh", *["model parallel"] * (name == "lightning")):
                ours = run(name, way, here)
                as_plain(way, plain, ours)
                same_in_all(here, without_buffers(ours.values))
                said = here.all_say(ours.losses)
                assert said[0] != said[1] or name == "trainer", "rows of its own"
        first, again = run(name, "saves", here), run(name, "resumes", here)
        assert not differing(first.values, again.values)
        assert len(first.states) == len(first.values.keys() - {HEAD})
        for mine, theirs in zip(first.states, again.states, strict=True):
            assert mine.keys() == {"step", "exp_avg", "exp_avg_sq"} and not differing(mine, theirs)
        assert differing(first.saved, first.values), "two steps lie between"
        if here.rank == 0:
            FILES[name](here.folder, first.saved, first.values)

    return trains_and_resumes


def without_buffers(values: Values) -> Values:
    """Where no DistributedDataParallel sends them, or none has since, they are a rank's own."""
    return {name: value for name, value in values.items() if "running" not in name}


def as_plain(way: str, plain: Job, ours: Job) -> None:
    """Losses, parameters and buffers are the plain ones."""
    assert len(plain.losses) >= STEPS
    near = 0.0 if way == "ddp" else 1e-5
    assert ours.losses == pytest.approx(plain.losses, rel=near, abs=0.0)
    a, b = ours.values, plain.values
    if way == "model parallel":
        a, b = without_buffers(a), without_buffers(b)
    assert not differing(a, b, near)


# The files hold all of each tensor, and a plain model loads them.


def pretrained(folder: Path) -> Values:
    """What `from_pretrained()` finds."""
    from transformers import Qwen2ForCausalLM

    model, said = Qwen2ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    return dict(model.state_dict())


def whole_states(found: Any, values: Values) -> bool:
    """Has an optimizer's state dict all of each moment, as a plain optimizer loads it?"""
    moments = [state[key] for state in found["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    shapes = sorted(tuple(moment.shape) for moment in moments)
    expected = [tuple(value.shape) for name, value in values.items() if name != HEAD]
    return {type(moment) for moment in moments} == {Tensor} and shapes == sorted(2 * expected)


def of_trainer(folder: Path, saved: Values, last: Values) -> None:
    for step, values in ((SAVED, saved), (STEPS, last)):
        checkpoint = folder / "out" / f"checkpoint-{step}"
        assert not differing(pretrained(checkpoint), values)
        assert whole_states(torch.load(checkpoint / "optimizer.pt"), saved)
    assert not differing(pretrained(folder / "model"), last)


def of_accelerate(folder: Path, saved: Values, last: Values) -> None:
    from safetensors.torch import load_file

    for at, values in (("state", saved), ("model", last)):
        found = load_file(folder / at / "model.safetensors")
        assert differing(found, values) == [f"only in one: {HEAD}"]
    assert not differing(pretrained(folder / "pretrained"), last)
    assert whole_states(torch.load(folder / "state" / "optimizer.bin"), saved)


def of_lightning(folder: Path, saved: Values, last: Values) -> None:
    for step, values in ((SAVED, saved), (STEPS, last)):
        found = torch.load(folder / "out" / f"step={step}.ckpt", weights_only=False)
        ours = {name.removeprefix("model."): v for name, v in found["state_dict"].items()}
        assert not differing(ours, values)
        assert whole_states(found["optimizer_states"][0], saved)


FILES: dict[str, Callable[[Path, Values, Values], None]] = {
    "trainer": of_trainer,
    "accelerate": of_accelerate,
    "lightning": of_lightning,
}
PARTS: dict[str, dict[str, Check]] = {name: {"trains, resumes": check(name)} for name in LOOPS}
