"""Lines that move are for terminals, whatever the environment says of colours."""

import io

import pytest

from meshlayout._render.consoles import console_on


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("colour", [None, "1"])
def test_a_terminal_is_what_the_stream_says(colour, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if colour is not None:
        monkeypatch.setenv("FORCE_COLOR", colour)
    assert not console_on(io.StringIO()).is_terminal
    assert console_on(Terminal()).is_terminal
