"""What newcomers ask first is answered."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version


def test_the_version_is_told_in_one_line(terminal: Callable[..., tuple[int, str, str]]) -> None:
    assert terminal("--version") == (0, f"supernode {version('supernode-sdk')}\n", "")


def test_a_misspelt_model_is_told_before_what_goes_with_it(terminal: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = terminal("plan", "--model", "llama3-80b")

    assert (code, out) == (2, "")
    assert "unknown model `llama3-80b`" in err
    assert "did you mean `llama3-8b`" in err
    assert "--batch" not in err


def test_a_known_model_without_numbers_asks_for_them(terminal: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = terminal("plan", "--model", "llama3-8b")

    assert code == 2
    assert "give `--batch` (samples) and `--sequence` (tokens)" in err
