"""Finds the value of every node of a captured graph: its meta, what shares its memory, what changes
it.

The captured graph runs once on fake tensors under functionalization, so nothing is computed and
nothing of the user's is changed. What equal layers do is run once, and recalled for the others
(`megacompile.passes.capture.recall`).
"""

from __future__ import annotations

from megacompile import compat
from megacompile.errors import UnsupportedGraphError
from megacompile.ir.capture import Capture
from megacompile.passes.capture.interpret import Interpreter, Values
from megacompile.passes.capture.recall import Recalling

__all__ = ["Values", "propagate"]


def propagate(capture: Capture, *, recall: bool = True) -> Values:
    """Run `capture` on fake tensors.

    Args:
        recall: what is known of an operation is taken for others that are equal.

    Raises:
        UnsupportedGraphError: an operator has no fake kernel, or a shape that depends on data.
    """
    if recall:
        try:
            return _run(Recalling(capture, Values()))
        except Exception:  # whatever needs the tensors themselves: the plain run says what is wrong
            pass
    try:
        return _run(Interpreter(capture, Values()))
    except compat.UNTRACEABLE as error:
        raise UnsupportedGraphError(f"{capture.name}: {error}") from error


def _run(interpreter: Interpreter) -> Values:
    capture, values = interpreter.capture, interpreter.values
    values.symbols = interpreter.symbols
    with capture.ambient.apply(), compat.keeping_nesting(), interpreter.fakes:
        if values.symbols is not None:
            values.symbols.fakes.require(capture.conditions)
        inputs = [interpreter.fake_input(item) for item in capture.inputs]
        constants = interpreter.fake_constants()
        with compat.functional_mode():
            interpreter.constants = {k: compat.to_functional(v) for k, v in constants.items()}
            wrapped = [compat.to_functional(value) for value in inputs]
            interpreter.run(*wrapped, enable_io_processing=False)
    return values
