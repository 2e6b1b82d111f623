"""What a user wants to see of a run beside its numbers, in the command that watches: a trace, profiles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from commbench.errors import SpecError, UsageError
from commbench.units import decimal_size

TRACES_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
EVERYTHING = "auto"  # the activities that torch can profile where the rank runs


@dataclass(frozen=True, slots=True)
class Look:
    """profile: activities, () for none. trace: whether spans are noted. endpoint: where they are sent, "" for nowhere.
    asked: whether the user named the endpoint (and not the environment)."""

    profile: tuple[str, ...] = ()
    trace: bool = False
    endpoint: str = ""
    asked: bool = False

    @classmethod
    def of(cls, profile: str | None, trace: bool, endpoint: str | None, environment: Mapping[str, str]) -> Look:
        """From the flags. An endpoint asks for a trace. Raises SpecError or UsageError naming the flag, also where the
        extra for OTLP is missing."""
        activities: tuple[str, ...] = ()
        if profile is not None:
            from commbench.harness.views.profiling import parse_activities

            activities = (EVERYTHING,) if profile == EVERYTHING else parse_activities(profile)
        if not trace and endpoint is None:
            return cls(activities)
        if endpoint is not None:
            from commbench.harness.views.otlp import exporter_to

            exporter_to(endpoint)
            return cls(activities, True, endpoint, asked=True)
        general = environment.get(ENDPOINT_VARIABLE, "")
        default = environment.get(TRACES_VARIABLE, "") or (f"{general.rstrip('/')}/v1/traces" if general else "")
        return cls(activities, True, default)

    def check(self, device: str) -> None:
        """Raises SpecError for an activity that the run's device does not have."""
        for activity in self.profile:
            if activity not in (EVERYTHING, "cpu", device):
                raise SpecError(
                    f"--profile: activity {activity!r} needs --device {activity}, this run is on {device}; "
                    "take --profile=cpu"
                )

    @contextlib.contextmanager
    def at(self, directory: Path, warn: Callable[[str], None]) -> Iterator[None]:
        """Around the run into a directory."""
        with contextlib.ExitStack() as stack:
            if self.profile:
                from commbench.harness.views.profiling import PROFILE_VARIABLE
                from commbench.harness.views.tracing import environment

                stack.enter_context(environment({PROFILE_VARIABLE: ",".join(self.profile)}))
            if self.trace:
                from commbench.harness.views.tracing import traced

                stack.enter_context(traced(directory, self._endpoint(warn), warn))
            yield

    def _endpoint(self, warn: Callable[[str], None]) -> str:
        """What the environment names must not stop a sweep."""
        if self.endpoint and not self.asked:
            from commbench.harness.views.otlp import exporter_to

            try:
                exporter_to(self.endpoint)
            except UsageError as error:
                warn(str(error).replace("--otlp-endpoint", f"{ENDPOINT_VARIABLE}:"))
                return ""
        return self.endpoint

    def told(self, directory: Path) -> list[str]:
        """Lines on where to find what was asked for, after the run."""
        lines = []
        if self.trace:
            from commbench.harness.views.trace_file import TRACE_JSON, listed

            path = directory / TRACE_JSON
            if path.exists():
                size = decimal_size(path.stat().st_size)
                lines += [f"trace: {path} ({size}; open it with ui.perfetto.dev)", *listed(directory)]
        if self.profile:
            from commbench.harness.views.profiling import PROFILES_DIR

            found = sorted((directory / PROFILES_DIR).glob("*.trace.json"))
            size = decimal_size(sum(path.stat().st_size for path in found))
            elsewhere = " of the ranks of this host" if _several_hosts(directory) else ""
            lines.append(
                f"profiles: {directory / PROFILES_DIR} ({len(found)} Chrome traces{elsewhere}, {size}; open each with "
                "ui.perfetto.dev); profiled calls are slower, so do not compare this run with others"
            )
        return lines


def _several_hosts(directory: Path) -> bool:
    from commbench.store.run import open_run

    return int(open_run(directory).manifest["spec"]["nnodes"]) > 1
