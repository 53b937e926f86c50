"""How do the cards of one generation exchange bytes? The protocols of its collective library, from the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from supernode.errors import SpecError
from supernode.registry import did_you_mean, lookup

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """One protocol: what a collective costs while the library uses it.

    Attributes:
        latency: seconds once per collective, beyond the launch.
        hop: least seconds of one step, however short its message.
        bandwidth: bytes/s of a card, one direction, that long messages reach.
        fill: bytes that must be under way before the pipeline of chunks runs full; a transfer pays for them once
            more, shorter transfers for less.
    """

    latency: float = 0.0
    hop: float
    bandwidth: float
    fill: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """How a family of collectives moves its messages.

    Attributes:
        short: bands for short messages (LL, LL128); the fastest serves.
        long: the band for long ones (Simple).
        copy: bytes/s at which a card copies its own share to its place.
        switch: bytes of a step's message from which the library takes the long band.
        switch_first: bytes added to that, divided by the steps: libraries compare estimates that are linear in steps.
    """

    short: tuple[Band, ...]
    long: Band
    copy: float
    switch: float
    switch_first: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InSwitch:
    """All-reduce by switches that add (NVLS): each card sends and receives (n + 1) / n of its bytes.

    Attributes:
        latency: seconds beyond the launch.
        bandwidth: bytes/s of a card, one direction.
        fill: as in `Band`.
        switch: bytes per card from which the library takes it.
    """

    latency: float
    bandwidth: float
    fill: float = 0.0
    switch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """What a group that no narrower width holds must cross: a PCIe root, a socket's link.

    Attributes:
        cards: that lie within it.
        bandwidth: share of the narrowest width's that is left.
        hop: multiple of the narrowest width's.
    """

    cards: int
    bandwidth: float
    hop: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One generation of cards with its links, switches and collective library.

    Attributes:
        systems: names of the machines that it describes.
        launch: seconds of a collective that moves nothing.
        ring: all-reduce, all-gather, reduce-scatter.
        exchange: all-to-all and single messages.
        network: rings across nodes; None where none was measured.
        network_exchange: single messages across nodes.
        in_switch: None where switches do not add.
        widths: from narrow to wide; empty where all cards are alike.
        patient: whether the library stays in a short band for as long as it is the faster one.
        versions: names of library versions to what differs under them.
    """

    systems: tuple[str, ...]
    launch: float
    ring: Path
    exchange: Path
    network: Path | None = None
    network_exchange: Path | None = None
    in_switch: InSwitch | None = None
    widths: tuple[Width, ...] = ()
    patient: bool = False
    versions: Mapping[str, Mapping[str, Any]]
    source: str

    def of(self, library: str | None) -> Transport:
        """Return the transport under one version of the library; unknown ones are like the newest."""
        return replace(self, **self.versions.get(library or "", {}))


def transport(system: str, *, library: str | None = None) -> Transport:
    """Return the transport that a machine uses.

    Args:
        system: a machine ("h100_sxm") or a generation ("NVLink-4").
        library: version of its collective library; None is the newest that was measured.

    Raises:
        SpecError: nobody measured that machine.
    """
    return lookup(system, by_system(), kind="system with measured collectives").of(library)


@cache
def by_system() -> dict[str, Transport]:
    """Return every transport of the catalogue, by its own name and those of its machines."""
    text = (files("supernode.collectives") / "catalog" / "collectives.yaml").read_text("utf-8")
    named = read_transports(text, file="collectives.yaml")
    return named | {system: each for each in named.values() for system in each.systems}


def read_transports(text: str, *, file: str) -> dict[str, Transport]:
    """Return the transports that a YAML text describes, by name.

    Raises:
        SpecError: the text is not YAML, or a key is unknown or missing.
    """
    import yaml

    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError(f"{file} is not YAML: {error}", hint="mend the line that it names.") from error
    if not isinstance(entries, dict):
        raise SpecError(f"{file} holds no mapping", hint="write `NAME:` and, indented below it, its attributes.")
    return {str(name): read_transport(entry, where=f"{file}, `{name}`") for name, entry in entries.items()}


def read_transport(entry: object, *, where: str) -> Transport:
    """Return the transport that a mapping describes, all quantities in SI units or bytes.

    Args:
        where: where the mapping comes from; named in errors.

    Raises:
        SpecError: a key is unknown, missing, or no number.
    """
    return _read(Transport, entry, where)


def _read(kind: type[T], entry: object, where: str) -> T:
    if not isinstance(entry, dict):
        raise SpecError(f"{where}: no mapping", hint="indent the attributes below the name.")
    values = _values(kind, entry, where)
    absent = [item.name for item in fields(kind) if item.default is MISSING and item.name not in values]  # type: ignore[arg-type]
    if absent:
        raise SpecError(f"{where}: no `{absent[0]}`", hint=f"add `{absent[0]}:` to the entry.")
    return kind(**values)


def _values(kind: type[T], entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    for key in entry:
        if key not in known:
            raise SpecError(f"{where}: unknown key `{key}`", hint=did_you_mean(str(key), known))
    return {key: _value(key, value, f"{where}, `{key}`") for key, value in entry.items()}


def _value(key: str, value: Any, where: str) -> Any:
    if key in _PARTS and isinstance(value, dict):
        return _read(_PARTS[key], value, where)
    if key in _LISTS:
        return tuple(_read(_LISTS[key], item, where) for item in value)
    if key == "versions":
        return {str(name): _values(Transport, item, where) for name, item in value.items()}
    if key in _BARE:
        return tuple(value) if isinstance(value, list) else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise SpecError(
            f"{where} is {value!r}", hint="write a number in SI units, not negative; YAML wants 1.0e-6, not 1e-6."
        )
    return value


_PARTS: dict[str, type[Any]] = {
    "ring": Path, "exchange": Path, "network": Path, "network_exchange": Path, "long": Band, "in_switch": InSwitch,
}  # fmt: skip
_LISTS: dict[str, type[Any]] = {"short": Band, "widths": Width}
_BARE = ("systems", "patient", "source")
