"""What an error or a warning says, in full."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest

from tests import inside


def heard(provoke: Callable[[], object]) -> list[str]:
    inside.say_again()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        provoke()
    return [text for w in caught if (text := str(w.message)).startswith("megacompile")]


def assert_says(provoke: Callable[[], object], kind: type[Exception], text: str) -> None:
    """This, of this class; a warning once. `{}` stands for what differs from run to run."""
    if issubclass(kind, Warning):
        (found,) = heard(provoke)
    else:
        with warnings.catch_warnings(), pytest.raises(kind) as raised:
            warnings.simplefilter("ignore")
            provoke()
        error = raised.value
        assert type(error) is kind
        found = str(error.args[-1] if isinstance(error, OSError) else error)
    pattern = ".*".join(map(re.escape, text.split("{}")))
    assert re.fullmatch(pattern, found, re.DOTALL), found
