"""What does a YAML file hold? Reads one mapping: no duplicate key, no alias, no surprise in what a word means."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from supernode.errors import SpecError

LARGEST_FILE = 2**20
DEEPEST = 16
_PLAIN = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|nan))\Z",
    re.I,
)
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z")


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return, by first letter, which plain words are not text."""
    kept = {
        first: [(tag, pattern) for tag, pattern in known if tag in (_PLAIN + "bool", _PLAIN + "null")]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    numbers = [(_PLAIN + "float", _FLOAT), (_PLAIN + "int", _INT)]
    return kept | dict.fromkeys("-+.0123456789", numbers)


class _Loader(yaml.SafeLoader):
    """Numbers as YAML 1.2 has them: 3e-3 is one; 010, 1:30 and 2024-01-31 stay text."""

    yaml_implicit_resolvers = _resolvers()
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None):
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not read here", problem_mark=event.start_mark)
        if getattr(event, "tag", None):
            raise yaml.MarkedYAMLError(problem=f"the tag `{event.tag}` is not read here", problem_mark=event.start_mark)
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"nested more than {DEEPEST} deep", problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is not text", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key `{key}` is there twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the file's keys and values.

    Raises:
        SpecError: the file cannot be read, is too large or too deep, is not YAML, or is no mapping.
    """
    text = _text(path)
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SpecError(
            f"{path}{where}: {error.problem or error.context}",
            hint="each key stands once in its section, as `key: value`, indented with spaces; write values out.",
        ) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise SpecError(f"{path} is not YAML: {reason}", hint="remove what is named, or put it in quotes.") from None
    if value is None:
        raise SpecError(f"{path} is empty", hint="write the job's keys into it; examples/demo.yaml shows them.")
    if not isinstance(value, dict):
        raise SpecError(f"{path} holds a {type(value).__name__}, not keys", hint="write one `key: value` on each line.")
    return value


def _text(path: Path) -> str:
    try:
        content = _content(path)
    except OSError as error:
        raise SpecError(
            f"{path} cannot be read: {error.strerror}", hint="check the path and its permissions."
        ) from error
    if len(content) > LARGEST_FILE:
        raise SpecError(
            f"{path} is larger than 1 MiB", hint="a job file is a page of YAML; put data into files of its own."
        )
    if b"\0" in content:
        raise SpecError(f"{path} holds NUL bytes, so it is no text", hint="name a job file in YAML, saved as UTF-8.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 at byte {error.start}", hint="save the file as UTF-8.") from None


def _content(path: Path) -> bytes:
    if path.is_dir():
        raise SpecError(f"{path} is a folder", hint="name the job file inside it.")
    if not path.exists():
        raise SpecError(f"{path} does not exist", hint="check the path; examples/demo.yaml is a job file to copy.")
    if not path.is_file():
        raise SpecError(f"{path} is not a regular file", hint="name a job file on disk.")
    with path.open("rb") as file:
        return file.read(LARGEST_FILE + 1)


def read_value(text: str, *, key: str) -> Any:
    """Return a value as a file would hold it behind `key:`.

    Raises:
        SpecError: it is not YAML.
    """
    if len(text) > LARGEST_FILE:
        raise SpecError(f"`{key}` is {len(text):,} characters long", hint="put it into the job file.")
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(f"`{key}` is {text!r}, which cannot be read", hint="quote it as in the job file.") from error
