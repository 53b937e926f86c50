"""The terminal: reads flags, makes one call, shows what came of it. Data goes to stdout, talk to stderr."""

from __future__ import annotations

import errno
import io
import json
import sys
from contextlib import suppress
from typing import Annotated, Any

import typer

from supernode.cli.advise import compare, forecast, plan
from supernode.cli.availability import availability
from supernode.cli.calibrate import calibrate
from supernode.cli.checkpoint import checkpoint as checkpoint_verbs
from supernode.cli.claims import claims
from supernode.cli.flags import (
    Card,
    Cards,
    Cooling,
    Folder,
    Here,
    Interconnect,
    JobFile,
    Json,
    Mtbf,
    Named,
    Older,
    Out,
    Run,
    Set,
    local,
    node,
    overrides_of,
)
from supernode.cli.words import printable
from supernode.errors import SupernodeError

STOPPED = 130
"""Exit code of what was interrupted, as shells have it: 128 and the number of SIGINT."""

app = typer.Typer(
    name="supernode", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
)  # fmt: skip


def _tell_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"supernode {version('supernode-sdk')}")
        raise typer.Exit


@app.callback(
    epilog="A job file to copy: examples/demo.yaml; all its keys: docs/job-file.md. Every command has --help."
)
def supernode(
    version: Annotated[bool, typer.Option("--version", help="Show the version and leave.", callback=_tell_version,
                                          is_eager=True)] = False,
) -> None:  # fmt: skip
    """Many accelerator cards as one machine: plan, simulate, run, resume, report."""


app.command()(plan)
app.command()(compare)
app.command()(forecast)


@app.command()
def simulate(
    file: JobFile, cards: Cards = None, card: Card = "", interconnect: Interconnect = "",
    cooling: Cooling = "", machine: Named = "", mtbf: Mtbf = "",
    seed: Annotated[int, typer.Option("--seed", help="Other seeds draw other failures.")] = 0, out: Out = None,
    overrides: Set = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Play a job in virtual time: one step event by event, then the whole run with failures."""
    from supernode.cli import show
    from supernode.intake.jobfile import load_job
    from supernode.units import parse_seconds

    job = load_job(file, overrides=overrides_of(overrides))
    between = parse_seconds(mtbf, key="--mtbf") if mtbf else float("inf")
    result = node(cards, card, interconnect, cooling, machine, job).simulate(job, mtbf=between, seed=seed)
    show.simulation(result, result.write(out) if out is not None else (), as_json=as_json)


@app.command()
def run(
    file: JobFile, cards: Here = None, folder: Folder = None, overrides: Set = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Train on this computer until the job is done. Ctrl-C saves and stops, with exit code 130; twice stops now."""
    from supernode.cli import show
    from supernode.cli.watching import Watching
    from supernode.control.training import start
    from supernode.intake.jobfile import load_job

    job = load_job(file, overrides=overrides_of(overrides))
    with Watching(quiet=as_json) as watching:
        report = start(
            local(cards, job).pool,
            job,
            folder=folder,
            watch=watching.see,
            server=_taken_server(),
            progress=watching.prepare,
            placed=watching.place,
        )
    show.report(report, as_json=as_json)
    _leave(report)


@app.command()
def resume(
    run: Run, cards: Here = None, checkpoint: Older = "",
    overrides: Set = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Go on with a stopped, failed or orphaned run, on the same layout or on fewer or more cards."""
    from supernode.cli import show
    from supernode.cli.watching import Watching
    from supernode.control import runs
    from supernode.control.training import changed
    from supernode.control.training import resume as go_on

    changes = overrides_of(overrides)
    job = changed(runs.find(run).job(), changes)
    with Watching(quiet=as_json) as watching:
        watching.place(runs.find(run).path)
        report = go_on(
            local(cards, job).pool, run, checkpoint=checkpoint, overrides=changes, cards=cards,
            watch=watching.see, server=_taken_server(),
        )  # fmt: skip
    show.report(report, as_json=as_json)
    _leave(report)


@app.command()
def status(run: Run, as_json: Json = False) -> None:
    """Show how a run stands, from any terminal."""
    from supernode.cli import show
    from supernode.control.training import status as state_of

    show.status(state_of(run), as_json=as_json)


@app.command()
def report(run: Run, as_json: Json = False) -> None:
    """Write report.html and report.json into a run's folder."""
    from supernode.cli import show
    from supernode.control.training import write_report

    show.report(write_report(run), as_json=as_json)


@app.command("machine")
def sheet(
    cards: Cards = None, card: Card = "", interconnect: Interconnect = "", cooling: Cooling = "",
    machine: Named = "", as_json: Json = False,
) -> None:  # fmt: skip
    """Show a machine's sheet: memory, FLOP/s, bandwidth, watts and cost, all derived from its parts."""
    from supernode.cli import show

    show.machine(node(cards, card, interconnect, cooling, machine, None).sheet(), as_json=as_json)


app.command()(availability)
app.command()(calibrate)
app.command()(claims)
app.add_typer(checkpoint_verbs)


def main(server: Any = None) -> None:
    """Run the command line; errors with a remedy are shown without a traceback and end with exit code 2.

    Args:
        server: a fork server started ahead of the command that will need it.
    """
    if server is not None:
        _SERVER.append(server)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # A terminal that knows no such character still has the others.
    try:
        answer = app(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        code = answer if isinstance(answer, int) else 0
        if code == STOPPED:  # Typer's answer to Ctrl-C.
            _complain("interrupted", "")
    except SupernodeError as error:
        _complain(error.message, error.hint)
        code = error.exit_code
    except _Stopped:
        code = STOPPED
    except (KeyboardInterrupt, typer.Abort):
        _complain("interrupted", "")
        code = STOPPED
    except BrokenPipeError:
        sys.stdout = None  # The reader has gone; nothing more can be said to it.
        code = 0
    except OSError as error:
        if error.filename is not None or error.errno not in (*_FULL, errno.EIO):
            raise
        sys.stdout = None  # What it still holds cannot be written either.
        code = 0  # Its terminal has gone.
        if error.errno in _FULL:
            _complain(
                f"cannot write to stdout: {error.strerror}", "free some space where it goes, or send it elsewhere."
            )
            code = 2
    except Exception as error:
        # click's own complaints: an unknown flag, a missing file.
        if not hasattr(error, "format_message") or not hasattr(error, "exit_code"):
            raise
        context = getattr(error, "ctx", None)
        if message := error.format_message():  # None where no word at all was given, and help is shown.
            _complain(message, f"see `{context.command_path if context else 'supernode'} --help`.")
        code = 2
    finally:
        if _SERVER:
            _SERVER.pop().close()
    sys.exit(code)


class _Stopped(Exception):  # noqa: N818 - no error
    """Somebody stopped the run that a command began; all is said already."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SERVER: list[Any] = []


def _taken_server() -> Any:
    return _SERVER.pop() if _SERVER else None


def _leave(report: Any) -> None:
    """Leave with another exit code than a finished run's if somebody stopped this one."""
    if report.outcome == "stopped":
        raise _Stopped


def _complain(message: str, hint: str) -> None:
    """Say what is wrong on stderr; as JSON on stdout besides, where that was asked for."""
    with suppress(OSError, ValueError):  # Nobody listens.
        if sys.stderr is not None:
            print(f"error: {printable(message)}", file=sys.stderr)
            if hint:
                print(f"hint: {printable(hint)}", file=sys.stderr)
        if "--json" in sys.argv[1:] and sys.stdout is not None:
            print(json.dumps({"error": message, "hint": hint}), flush=True)


if __name__ == "__main__":
    main()
