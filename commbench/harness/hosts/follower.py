"""The ranks of a host that does not write the results: started, watched and ended as on every other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from commbench.errors import LaunchError
from commbench.harness.hosts.nodes import RunPart
from commbench.harness.launch import Launch
from commbench.harness.launchers.commands import Program
from commbench.harness.order import shuffled
from commbench.harness.supervision.scratch import scratch_folder
from commbench.harness.supervision.supervisor import Limits
from commbench.harness.views.elsewhere import SpansHere
from commbench.store import schema
from commbench.store.run import Plan, check_writable

SLACK_S = 15.0  # node 0, whose rank waits for those here, is to notice first: it knows of all ranks


@contextlib.contextmanager
def part_of(plan: Plan, ranks: int, limits: Limits, out: Path | None) -> Iterator[RunPart]:
    """What runs this host's ranks of a job. Plan and logs stand in ``out``, or in a temporary folder that goes at the
    end (of the next command here, where this one is killed). Raises StoreError where ``out`` cannot be used."""
    with contextlib.ExitStack() as stack:
        if out is None:
            folder = stack.enter_context(scratch_folder("node"))
        else:
            check_writable(out)
            folder = out
        (folder / schema.LOGS_DIR).mkdir(parents=True)
        plan.save(folder)

        def run_part(launch: int, program: Program) -> str:
            points = dict(shuffled(plan.points, int(plan.settings["seed"]), launch))
            longest = float(plan.settings.get("max_time_per_point_s", 1.0))
            job = Launch(folder, launch, ranks, points, program, replace(limits, slack_s=SLACK_S), longest)
            try:
                spans = SpansHere(folder, launch, program.variables)
                code = job.run(lambda event: None)
                if program.others is not None:
                    program.others.tell_spans(launch, spans.pieces())
            except LaunchError as error:
                return str(error)
            except OSError as error:
                return f"{error.filename or folder} cannot be written: {error.strerror or error}"
            return "" if code == 0 else job.failure()

        yield run_part
