"""The map of picks of dispatch policies: message size against dtype and mode, one policy or two side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from commbench.errors import UsageError
from commbench.policy import Policy
from commbench.policy.compare import DTYPES_COMPARED, SMALLEST
from commbench.policy.intervals import Interval, winners
from commbench.types import CallSignature, Platform
from commbench.units import format_size

LARGEST = 1 << 30
MODES = ("eager", "graph")
_FORMATS = (".png", ".svg", ".pdf")


def draw_policies(sides: Sequence[tuple[Policy, Platform]], place: str, out: Path) -> None:
    """Draw one column for each (policy, platform): a bar for each dtype and mode, coloured by the pick over sizes.

    place: the machine in words, for the title. Raises UsageError for another number of policies than one or two, and
    for a file name that is no picture's.
    """
    if len(sides) not in (1, 2):
        raise UsageError(f"a plot shows one policy or two, not {len(sides)}")
    if out.suffix not in _FORMATS:
        raise UsageError(f"{out} is not a picture; end it in {', '.join(_FORMATS)}")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    rows = [(dtype, mode) for dtype in DTYPES_COMPARED for mode in MODES]
    columns = [[_intervals(policy, platform, dtype, mode) for dtype, mode in rows] for policy, platform in sides]
    names = list(dict.fromkeys(_name(i) for column in columns for row in column for i in row))
    colours = {name: plt.get_cmap("tab20")(n % 20) for n, name in enumerate(names)}
    figure, axes = plt.subplots(
        1, len(sides), figsize=(7 * len(sides), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    try:
        for axis, (policy, _), column in zip(axes[0], sides, columns, strict=True):
            for y, row in enumerate(column):
                for interval in row:
                    left, right = interval.first, min(interval.last + 16, LARGEST)
                    axis.barh(y, right - left, left=left, height=0.82, color=colours[_name(interval)])
            axis.set_xscale("log", base=2)
            axis.set_xlim(SMALLEST, LARGEST)
            ticks = [1 << n for n in range(4, 31, 4)]
            axis.set_xticks(ticks, [format_size(t) for t in ticks])
            axis.set_yticks(range(len(rows)), [f"{dtype}, {mode}" for dtype, mode in rows])
            axis.set_xlabel("message size (multiples of 16 bytes)")
            axis.set_title(policy.name)
            axis.minorticks_off()
        axes[0][0].invert_yaxis()  # the columns share it
        figure.suptitle(f"Backend of an all_reduce on {place}")
        patches = [Patch(color=colours[name], label=name) for name in names]
        figure.legend(handles=patches, loc="outside lower center", ncols=min(len(names), 6), frameon=False)
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        plt.close(figure)


def _intervals(policy: Policy, platform: Platform, dtype: str, mode: str) -> list[Interval]:
    call = CallSignature("all_reduce", "sum", dtype, 0, 0, "contiguous", mode)
    return winners(policy.bind(platform, "all_reduce", dtype), call, SMALLEST, LARGEST)


def _name(interval: Interval) -> str:
    """A pick's name in the legend: the engine's word, with the backend where the word hides it."""
    route = interval.verdict.route
    if route is None:
        return interval.verdict.picked
    wrong = any(f.wrong_result for f in interval.verdict.faults)
    name = route.word if route.word == route.backend else f"{route.word} ({route.backend})"
    return f"{name}: UNREDUCED" if wrong else name
