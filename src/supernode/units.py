"""What is 80GiB? Reads quantities as people write them into SI or bytes, and writes them back for people."""

from __future__ import annotations

import math
import re

from supernode.errors import SpecError

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*")
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_TIME = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_bytes(text: str | float, *, bare: float = 1.0, key: str = "size") -> int:
    """Return a size in bytes.

    Args:
        text: "80GiB", "80 GB", "512M"; or a bare number.
        bare: bytes that a bare number counts (2**20 where a door speaks MB).
        key: the key or flag that holds it; named in the error.

    Raises:
        SpecError: not a size, negative, or not finite.

    >>> parse_bytes("80GiB") == 80 * 2**30 and parse_bytes(80 * 1024, bare=2**20) == 80 * 2**30
    True
    """
    return int(_parse(text, bare=bare, key=key, suffixes=("B", ""), example="80GiB", scales=_DECIMAL | _BINARY))


def parse_bandwidth(text: str | float, *, bare: float = 1.0, key: str = "bandwidth") -> float:
    """Return a bandwidth in bytes/s from "400GB/s", "400Gb/s" (bits), "400Gbit/s", or a bare number.

    Raises:
        SpecError: not a bandwidth, negative, or not finite.

    >>> parse_bandwidth("400GB/s") == 8 * parse_bandwidth("400Gb/s")
    True
    """
    if isinstance(text, str):
        for bits in ("bit/s", "bps", "b/s"):
            if text.strip().endswith(bits):
                whole = text.strip().removesuffix(bits) + "B/s"
                return _parse(whole, bare=1, key=key, suffixes=("B/s",), example="400Gbit/s", scales=_DECIMAL) / 8
    return _parse(text, bare=bare, key=key, suffixes=("B/s", ""), example="400GB/s", scales=_DECIMAL | _BINARY)


def parse_seconds(text: str | float, *, key: str = "time") -> float:
    """Return a duration in seconds from "90s", "5min", "250ms", "2h", or a bare number of seconds.

    Raises:
        SpecError: not a duration, negative, or not finite.

    >>> parse_seconds("5min")
    300.0
    """
    return _parse(text, bare=1, key=key, suffixes=("",), example="90s", scales=_TIME)


def parse_count(text: str | float, *, key: str = "count") -> float:
    """Return how many of "1.4T" (10^12), "300B" (10^9), "15M", "2k", or a bare number.

    Raises:
        SpecError: not a count, negative, or not finite.

    >>> parse_count("1.4T"), parse_count("300B") == parse_count("300G")
    (1400000000000.0, True)
    """
    return _parse(text, bare=1, key=key, suffixes=("",), example="1.4T", scales=_DECIMAL | {"B": 1e9})


def _parse(
    text: str | float, *, bare: float, key: str, suffixes: tuple[str, ...], example: str, scales: dict[str, float]
) -> float:
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        raise SpecError(f"`{key}` is {text!r}, not a quantity", hint=f'write a number or, say, "{example}".')
    if isinstance(text, (int, float)):
        value = float(text) * bare
    else:
        match = _NUMBER.fullmatch(text)
        if not match:
            raise SpecError(f"`{key}` is {text!r}, not a quantity", hint=f'write, say, "{example}".')
        number, unit = float(match[1]), match[2]
        factors = [
            scales[stem] for end in suffixes if unit.endswith(end) and (stem := unit[: len(unit) - len(end)]) in scales
        ]
        if unit and not factors:
            raise SpecError(f"`{key}` is {text!r}, and {unit!r} is not a unit of it", hint=f'write, say, "{example}".')
        value = number * (factors[0] if unit else bare)
    if not math.isfinite(value) or value < 0:
        raise SpecError(f"`{key}` is {text!r}; it must be finite and not negative", hint=f'write, say, "{example}".')
    return value


def show_bytes(nbytes: float) -> str:
    """Return a size for people, in binary units.

    >>> show_bytes(80 * 2**30)
    '80 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.3g} {unit}" if nbytes < 1000 else f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} PiB" if nbytes < 1000 else f"{nbytes:,.0f} PiB"


def show(value: float, unit: str) -> str:
    """Return a quantity for people with a decimal prefix.

    >>> show(9.89e14, "FLOP/s")
    '989 TFLOP/s'
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    for factor, prefix in ((1e-3, "m"), (1e-6, "µ"), (1e-9, "n")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def show_seconds(seconds: float) -> str:
    """Return a duration for people.

    >>> show_seconds(0.0123), show_seconds(75), show_seconds(90_000)
    ('12.3 ms', '1 min 15 s', '1 d 1 h')
    """
    if seconds < 60:
        return show(seconds, "s")
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds < 86_400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{int(seconds // 86_400)} d {int(seconds % 86_400 // 3600)} h"


def show_number(value: float) -> str:
    """Return a number with three digits that count, in full.

    >>> show_number(23_342.0), show_number(1.5), show_number(26_342_000.0)
    ('23,300', '1.5', '26,300,000')
    """
    return f"{float(f'{value:.3g}'):,.10g}"


def show_energy(joules: float) -> str:
    """Return an energy for people: joules while it is little, then watt-hours.

    >>> show_energy(8.2), show_energy(3.6e9)
    ('8.2 J', '1 MWh')
    """
    return show(joules, "J") if joules < 36_000 else show(joules / 3600, "Wh")


def count_of(count: int, thing: str) -> str:
    """Return how many of a thing there are.

    >>> count_of(1, "card"), count_of(1024, "card")
    ('1 card', '1,024 cards')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
