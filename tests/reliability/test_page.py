"""What people see of a machine's availability: the terminal, JSON, the page; and how bad words end."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from supernode.claims.table import show
from supernode.cli import main as cli
from supernode.pages.availability import hours_bars


def spoken(*words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["supernode", "availability", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def test_page_json_and_terminal_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = spoken("--spares", "2", "--json", "--out", str(tmp_path), capsys=capsys, monkeypatch=monkeypatch)
    said, kept = json.loads(out), json.loads((tmp_path / "availability.json").read_text())
    page = (tmp_path / "availability.html").read_text()
    code_of_words, words, _ = spoken("--spares", "2", capsys=capsys, monkeypatch=monkeypatch)

    assert code == code_of_words == 0
    assert said == kept
    assert said["redundancy"].startswith("2 spare nodes")
    assert f"{said['availability']:.4%}" in page
    assert f"{said['availability']:.4%}" in words
    assert not re.search(r"<script|http://(?!www.w3.org)|https://", page)
    assert (tmp_path / "availability.svg").read_text().startswith("<svg")


def test_bars_are_filled_where_the_claim_is_met() -> None:
    drawn = hours_bars([("short", 1000.0), ("long", 250_000.0)])

    assert re.findall(r'class="(hollow|solid)"', drawn) == ["hollow", "solid"]
    widths = [float(width) for width in re.findall(r'rect [^>]*width="([\d.]+)"', drawn)]
    assert widths[0] < widths[1]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--without", "walls"), "--without"), (("--spares", "-1"), "spares"), (("--by-hand", "some"), "--by-hand"),
        (("--card", "local"), "machine"), (("--pause", "-3s"), "--pause"), (("--days", "1e9"), "days"),
    ],
)  # fmt: skip
def test_bad_words_end_with_code_2_and_a_remedy(
    words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = spoken(*words, capsys=capsys, monkeypatch=monkeypatch)

    assert (code, out) == (2, "")
    assert "hint:" in err
    assert named in err
    assert "Traceback" not in err


def test_claims_say_what_holds_and_under_what() -> None:
    minutes, hours, lost = show(["S10", "S11"])

    assert minutes.verdict.word == "holds"
    assert hours.verdict.word == lost.verdict.word == "holds under"
    assert "0 of 419" in hours.verdict.detail
    assert any("out of reach" in text for text in hours.shown.assumptions)
