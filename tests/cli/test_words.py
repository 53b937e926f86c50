"""What comes from models, files and errors is shown and drives no terminal."""

from __future__ import annotations

import json

import pytest

from supernode.cli import main, show
from supernode.cli.words import printable, printable_json
from supernode.schema.report import Report

EVIL = "a\x1b]0;owned\x07\x1b[2J\r\x9b1m\x7f\udcff\tb\nü"


def test_only_what_a_terminal_would_obey_is_replaced() -> None:
    assert printable(EVIL) == "a�]0;owned��[2J��1m��\tb\nü"


def test_json_keeps_every_character_and_drives_no_terminal() -> None:
    text = printable_json({"sample": EVIL})

    assert text.isprintable()
    assert json.loads(text) == {"sample": EVIL}


def test_a_model_s_sample_and_an_error_are_shown_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report(
        name="n", outcome="finished", machine="local", layout="l", steps=1, loss=1.0, held_out_loss=None,
        bigram_loss=None, predicted={}, measured={}, wall={}, tokens_per_second=None, failures=0, repeats=0,
        repeats_identical=0, losses={}, held_out={}, incidents=(), sample=EVIL,
    )  # fmt: skip

    show.report(report, as_json=False)
    show.report(report, as_json=True)
    show.talk(EVIL)
    main._complain(EVIL, EVIL)
    out, err = capsys.readouterr()

    for text in (out, err):
        assert not set("\x1b\x07\r\x9b\x7f\udcff") & set(text)
