"""Lines that move are for terminals, whatever the environment says of colors."""

import io

import pytest

from meshlayout._render.consoles import console_on


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("color", [None, "1"])
def test_a_terminal_is_what_the_stream_says(color, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if color is not None:
        monkeypatch.setenv("FORCE_COLOR", color)
    assert not console_on(io.StringIO()).is_terminal
    assert console_on(Terminal()).is_terminal
