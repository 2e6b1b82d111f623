"""The command line: one file per command, imported only when that command runs."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from commbench import __version__
from commbench.cli._click import Commands
from commbench.errors import CommbenchError

# command → its line in --help; the module commbench.cli.<name> holds it as `command`
COMMANDS = {
    "sweep": "Measure collectives on this machine and write a report.",
    "sweeps": "List the sweeps that come with commbench.",
    "weights": "Measure how long a model's weights take from a trainer to an engine.",
    "report": "Write plots and a page for one or several runs.",
    "compare": "Compare two runs, policies or backends: ratios with intervals, worst first.",
    "gate": "Judge whether a run got slower than a baseline, a history or another build.",
    "history": "Keep the runs of many nights, and plot how points developed.",
    "tune": "Find the thresholds of this machine and write them as a policy.",
    "regret": "Hold each pick against the fastest backend, worst first.",
    "export": "Write a policy's thresholds for an engine to read.",
    "explain": "Say which backend a call takes and why, without a GPU.",
    "policies": "List, show, compare and check dispatch policies.",
    "calibrate": "Measure the instrument: timer, start, known answers, noise floor.",
    "doctor": "Say what is available here, what is not, and what to do.",
}


class ReaderGone(Exception):
    """Who read our output has gone (head, less)."""


class LazyGroup(Commands):
    """Knows its commands by name; imports one when it is asked for."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderGone from error  # click itself would exit with 1, which says that something was found

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"commbench.cli.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="commbench")
def group() -> None:
    """Measure collective communication, see which backend each all-reduce takes, and judge what changed.

    Start with: commbench sweep --tp 2
    """


def _terminated(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _said(error: OSError) -> str | None:
    """An error of the user's surroundings in words; None for one of ours."""
    if error.filename is not None:  # a file or folder that the user named, and that no command has looked at closely
        return f"{error.filename}: {error.strerror}"
    if error.errno == errno.ENOENT and _folder_is_gone():
        return "the present folder is gone; change to one that exists"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        if _is_of_output(error):
            _forget_output()
            return f"standard output: {error.strerror}"
        return f"a result could not be written: {error.strerror}; make room, or write to another place"
    return None


def _is_of_output(error: OSError) -> bool:
    """Whether it is the terminal, pipe or file behind standard output that takes nothing. What is written there goes
    through click or rich, or still waits and fails again."""
    import traceback

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames and str(frames[-1].f_globals.get("__name__")).partition(".")[0] in ("click", "rich"):
        return True
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _folder_is_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _forget_output() -> None:
    """Nothing more to standard output: what is still unwritten would fail again at exit."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


def main() -> NoReturn:
    """Run a command. Bad input ends with one line and exit code 2, an interruption with 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an ASCII or Latin-1 terminal shows ? for µ, and no traceback
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, _terminated)  # what a CI runner sends: end as on Ctrl-C, keeping results
    try:
        code = group.main(prog_name="commbench", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except CommbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        sys.exit(0)
    except click.ClickException as error:
        print(f"error: {error.format_message()}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except ReaderGone:
        _forget_output()
        sys.exit(141)
    except OSError as error:
        said = _said(error)
        if said is None:
            raise
        print(f"error: {said}", file=sys.stderr)
        sys.exit(2)
