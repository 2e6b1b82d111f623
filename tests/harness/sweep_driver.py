"""A sweep without its report, for tests of what may go wrong: ``sweep_driver.py RUN SPEC.json`` or ``… RUN --resume``.

Exit codes and the line on stderr are those of the command line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from commbench.errors import CommbenchError
from commbench.harness import run as harness
from commbench.harness.resume import unfinished
from commbench.harness.supervision.supervisor import Limits
from commbench.sweep import make_spec


def main() -> int:
    directory, what, *rest = sys.argv[1:]
    try:
        if what == "--resume":
            work = unfinished(Path(directory), rest)
            limits = Limits(work.spec.point_timeout)  # a launch may take as long as it does now
            harness.resume(work, lambda event: None, retry=rest, limits=limits)
        else:
            spec = make_spec(json.loads(what), {})
            expansion, settings = harness.prepare(spec)
            harness.execute(spec, expansion, settings, Path(directory), lambda event: None)
    except CommbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
