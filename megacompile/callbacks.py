"""Callbacks that log `megacompile.metrics()` with a trainer's own figures, and so to TensorBoard,
W&B and others that the trainer writes to."""

from __future__ import annotations

from typing import Any

from torch import nn

from megacompile import compat
from megacompile.errors import MissingExtraError, ModelError
from megacompile.inspection import metrics
from megacompile.runtime.model.streamed import StreamedModel

_PREFIX = "megacompile/"


def for_trainer(trainer: Any) -> None:
    """Add `metrics()` to what a `transformers.Trainer` logs about training, as "megacompile/step_s"
    and so on.

    Args:
        trainer: its model, or a module in it, is megacompiled.

    Raises:
        MissingExtraError: transformers is not installed.
        ModelError: no module of the model is megacompiled.

    Example::

        trainer = Trainer(model=megacompile(model), ...)
        megacompile.callbacks.for_trainer(trainer)
        trainer.train()
    """
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise MissingExtraError("for_trainer(): pip install transformers") from None
    model = _megacompiled(trainer.model, "for_trainer")

    class LogMetrics(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            metrics(model)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            if "loss" in logs:  # not an evaluation's
                logs.update(_named(model))

    # before the callbacks that write the logs
    trainer.callback_handler.callbacks.insert(0, LogMetrics())


def for_lightning() -> Any:
    """Create a callback of Lightning that logs `metrics()` at the trainer's `log_every_n_steps`.
    The `LightningModule`, or a module in it, is megacompiled.

    Raises:
        MissingExtraError: lightning is not installed.
        ModelError: at the start of the training, if no module is megacompiled.

    Example::

        Trainer(callbacks=[megacompile.callbacks.for_lightning()])
    """
    try:
        from lightning.pytorch import Callback
    except ImportError:
        raise MissingExtraError("for_lightning(): pip install lightning") from None

    class LogMetrics(Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            metrics(_megacompiled(pl_module, "for_lightning"))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            every = trainer.log_every_n_steps  # 0: never
            if every and trainer.global_step % every == 0:
                pl_module.log_dict(_named(_megacompiled(pl_module, "for_lightning")))

    return LogMetrics()


def _named(model: nn.Module) -> dict[str, float]:
    return {_PREFIX + name: value for name, value in metrics(model).to_dict().items()}


def _megacompiled(model: nn.Module, caller: str) -> nn.Module:
    """The first megacompiled module in a model, which may be wrapped."""
    for module in model.modules():
        if isinstance(compat.compiled_call(module), StreamedModel):
            return module
    name = type(model).__name__
    raise ModelError(
        f"{caller}(): no module of {name} is megacompiled; call megacompile() on one first"
    )
