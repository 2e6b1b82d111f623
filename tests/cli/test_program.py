"""What holds for every command: its help, the streams that it writes to, and the folder that it is started in."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

import commbench
from commbench.cli import COMMANDS, group
from commbench.errors import SpecError

Run = Callable[..., tuple[int, str, str]]


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command and every command of a command, with the words that call it."""
    context = click.Context(group)
    for name in COMMANDS:
        command = group.get_command(context, name)
        assert command is not None
        yield (name,), command
        if isinstance(command, click.Group):
            yield from (((name, inner), command.commands[inner]) for inner in command.commands)


EVERY = dict(commands())


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_tells_every_option_once_and_in_full(
    commbench: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = commbench(*words, "--help")
    assert code == 0
    assert "..." not in out.replace("[ARGS]...", "").replace("NAMES...", "")
    for parameter in EVERY[words].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{' '.join(words)} {parameter.opts[0]} has no help"
            starts = [line for line in out.splitlines() if line.startswith(f"  {parameter.opts[0]}")]
            assert len([line for line in starts if line.split()[0] == parameter.opts[0]]) == 1


def test_the_options_of_a_sweep_stand_under_headings(commbench: Run) -> None:
    out = commbench("sweep", "--help")[1]
    headings = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[0] == "What to measure:"
    assert headings[-1] == "Options:"
    assert len(out[out.index("\nOptions:\n") :].strip().splitlines()) == 2  # all have a heading but --help


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explain", "--size", "8MX"), "--size: size '8MX' is not a number of bytes"),
        (("explain", "--range", "8:x"), "--range: size 'x' is not a number of bytes"),
        (("sweep", "--join-timeout", "soon"), "--join-timeout: duration 'soon' is not a time"),
        (("sweep", "--sizes", "9" * 400), "--sizes: size '9999"),
        (("sweep", "--budget", "9" * 400), "--budget: duration '9999"),
        (("explain", "--op", "xor"), "'xor' is not one of"),
        (("tune", "--tp", "2", "--budget", "soon"), "--budget: duration 'soon' is not a time"),
        (("doctor", "--preflight", "--nnodes", "0"), "--nnodes 0: it takes at least 1 host"),
        (("policies", "shwo"), "no command 'shwo'; commands: check, diff, list, plot, show"),
        (("history", "lsit"), "no command 'lsit'; commands: add, list, plot, show"),
        (("sweep", "--nproc-per-node", "0"), "--nproc-per-node 0: a host has at least 1 rank"),
        (("sweep", "--nproc-per-node", "3", "--tp", "2"), "--nproc-per-node 3 on 1 host makes 3 ranks"),
    ],
)  # fmt: skip
def test_a_bad_value_is_told_with_its_option(commbench: Run, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = commbench(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--margin", "--sensitivity"])
def test_a_bad_share_is_told_with_its_option(flag: str) -> None:
    from commbench.cli.gate import RuleFlags

    with pytest.raises(SpecError, match=f"{flag}: 'x' is not a percentage"):
        RuleFlags(**{"margin": None, "alpha": None, "fewest": None, "sensitivity": None, flag[2:]: "x"}).rule([], 8)


def started(code: str, *, stdout: int, env: dict[str, str] | None = None, cwd: Path | None = None) -> tuple[int, str]:
    """A Python process that runs code: its exit code and stderr."""
    ended = subprocess.run(
        [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True, env=env, cwd=cwd, check=False
    )
    return ended.returncode, ended.stderr


@contextlib.contextmanager
def gone_reader() -> Iterator[int]:
    """The end to write to of a pipe that nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    try:
        yield write
    finally:
        os.close(write)


PROGRAM = "import sys; sys.argv = ['commbench', 'policies']; from commbench.cli import main; main()"


def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        assert started(PROGRAM, stdout=full.fileno()) == (2, "error: standard output: No space left on device\n")


def test_a_full_disk_under_a_result_is_not_blamed_on_standard_output() -> None:
    program = (
        "import click\nfrom pathlib import Path\nfrom commbench.cli import group, main\n"
        "def write(): print('shown'); Path('/dev/full').write_text('x')\n"
        "group.get_command = lambda ctx, name: click.Command('sweeps', callback=write)\n"
        "import sys; sys.argv = ['commbench', 'sweeps']; main()"
    )
    code, said = started(program, stdout=subprocess.DEVNULL)
    assert (code, said.startswith("error: a result could not be written: No space left on device; ")) == (2, True)


def test_a_reader_that_has_gone_ends_a_command_without_a_word() -> None:
    with gone_reader() as stdout:
        assert started(PROGRAM, stdout=stdout) == (141, "")


def test_a_reader_of_a_table_that_has_gone_is_no_finding() -> None:
    program = (
        "import sys; from commbench.cli import group, main; import click\n"
        "from commbench.report.console import Console\n"
        "group.get_command = lambda ctx, name: click.Command('sweeps', callback=lambda: Console().print('x'))\n"
        "sys.argv = ['commbench', 'sweeps']; main()"
    )
    with gone_reader() as stdout:
        assert started(program, stdout=stdout) == (141, "")


def test_tables_are_printed_on_our_own_console() -> None:
    for path in (Path(commbench.__file__).parent / "cli").glob("*.py"):
        assert "from rich.console" not in path.read_text(), f"{path.name}: take commbench.report.console"


def test_a_terminal_that_cannot_show_an_arrow_gets_a_question_mark(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("w") as file:
        assert started(PROGRAM, stdout=file.fileno(), env={**os.environ, "PYTHONIOENCODING": "latin-1"})[0] == 0
    assert b" ? " in out.read_bytes()


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    program = PROGRAM.replace("'policies'", "'report', 'x', '--out', 'y'")
    code = f"import os; os.rmdir({str(gone)!r})\n{program}"
    said = "error: the present folder is gone; change to one that exists\n"
    assert started(code, stdout=subprocess.DEVNULL, cwd=gone) == (2, said)
