"""The catalogue of collectives: what it reads, and what it refuses."""

from __future__ import annotations

import pytest

from supernode.collectives.transport import by_system, read_transports, transport
from supernode.errors import SpecError

BAND = "{hop: 1.0e-6, bandwidth: 1.0e+11}"
WAY = f"{{short: [{BAND}], long: {BAND}, copy: 1.0e+12, switch: 1.0e+6}}"
GOOD = f"Mine:\n  systems: [m]\n  launch: 5.0e-6\n  ring: {WAY}\n  exchange: {WAY}\n  versions: {{}}\n  source: me\n"


def test_every_transport_says_where_it_comes_from() -> None:
    assert all(each.source for each in by_system().values())


def test_a_machine_and_its_generation_are_one_transport() -> None:
    assert transport("h200_sxm") == transport("NVLink-4") == transport("h100_sxm")


def test_a_version_changes_only_what_it_names() -> None:
    newest, old = transport("h100_sxm"), transport("h100_sxm", library="2.23")

    assert old.launch != newest.launch
    assert old.ring == newest.ring


def test_a_transport_is_read() -> None:
    read = read_transports(GOOD, file="mine.yaml")["Mine"]

    assert read.ring.long.bandwidth == 100e9
    assert read.systems == ("m",)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("launch", "lunch", "unknown key `lunch`"),
        ("  source: me\n", "", "no `source`"),
        ("launch: 5.0e-6", "launch: soon", "`launch` is 'soon'"),
        ("launch: 5.0e-6", "launch: -1.0", "`launch` is -1.0"),
        ("Mine:", "- Mine:", "YAML|mapping"),
    ],
)
def test_a_wrong_entry_is_named(old: str, new: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        read_transports(GOOD.replace(old, new, 1), file="mine.yaml")

    assert caught.value.hint
