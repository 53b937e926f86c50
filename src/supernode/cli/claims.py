"""`supernode claims`: the table of what is claimed and what holds, on the terminal, as JSON, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from supernode.cli.flags import Json

if TYPE_CHECKING:
    from supernode.claims.claim import Entry

Names = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads the annotation at run time
    typer.Argument(metavar="ID", help="Claims, such as S3.1, or systems, such as S3.", show_default=False),
]
Page = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--out", metavar="FILE", help="Write a page with a picture for each claim.", show_default=False),
]


def claims(names: Names = None, out: Page = None, as_json: Json = False) -> None:
    """Compute each figure that is claimed for the product, and say which holds, where, and under which assumptions."""
    from supernode.claims.page import page, plain
    from supernode.claims.table import show as computed
    from supernode.cli import show
    from supernode.errors import SpecError
    from supernode.files import check_writable, write_whole

    if out is not None:
        try:
            check_writable(out)
        except OSError as error:
            raise SpecError(
                f"cannot write `--out {out}`: {error.strerror}", hint="name a file in a folder that exists."
            ) from None
    progress = None if as_json else show.talk
    entries = list(computed(names or (), progress=progress))
    if as_json:
        show.print_json([plain(entry) for entry in entries])
    else:
        show.grid("claims", ("id", "claim", "claimed", "ours", "how", "verdict"), [_cells(entry) for entry in entries])
    if out is not None:
        try:
            write_whole(out, page(entries))
        except OSError as error:
            raise SpecError(f"cannot write {out}: {error.strerror}", hint="name another file.") from None
        show.talk(str(out))


def _cells(entry: Entry) -> tuple[str, ...]:
    claim, shown, verdict = entry.claim, entry.shown, entry.verdict
    detail = f" {verdict.detail}" if verdict.detail else ""
    return (
        claim.id, claim.says, f"{claim.goal} {claim.words(claim.figure)}", claim.words(shown.ours), shown.how,
        f"{verdict.word}{detail}",
    )  # fmt: skip
