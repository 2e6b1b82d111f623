"""How far apart the clocks of two ranks are: bounds from ping-pong, and what they mean for a latency.

One rank asks, the other answers with a reading of its clock. The answer was read between the moment the question left
(t_last) and the moment the answer came (t_now), both on the asking rank's clock, so for each exchange

    t_remote − t_now ≤ offset ≤ t_remote − t_last        offset = remote clock − local clock

and over many exchanges offset ∈ [max(t_remote − t_now), min(t_remote − t_last)]. Nothing is assumed about how the
round trip divides into there and back; half the shortest one bounds the error of the midpoint (Hunold &
Carpen-Amarie, Reproducible MPI Benchmarking; Cristian 1989). Readings are int64 nanoseconds throughout, because float64
loses single nanoseconds after 104 days of uptime.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from commbench.errors import CommbenchError
from commbench.measure.clock import Clock, now_ns
from commbench.units import format_time

if TYPE_CHECKING:
    from commbench.measure.team import PageTeam

Readings = NDArray[np.int64]

ROUNDS = 200  # exchanges between two ranks; the shortest of them counts
LARGEST_ERROR_SHARE = 0.05  # of a latency, that the offset may leave uncertain
FEWEST_WINDOWS = 3  # a line through two points leaves no residuals
_LIMIT_S = 60.0  # for an answer


class ClockError(CommbenchError):
    """A clock that went back, jumped, or cannot be compared; the message says by how much."""


@dataclass(frozen=True, slots=True)
class Exchanges:
    """n ≥ 1 questions and answers between two ranks: three arrays (n,) of nanoseconds.

    sent and received are the asking rank's clock, answered is the other's. Raises ClockError where an answer came
    before its question was sent, or a question was sent before the answer to the one before: that clock went back.
    """

    sent: Readings
    answered: Readings
    received: Readings

    def __post_init__(self) -> None:
        n = len(self.sent)
        if n == 0 or len(self.answered) != n or len(self.received) != n:
            lengths = f"{n} sent, {len(self.answered)} answered, {len(self.received)} received"
            raise ValueError(f"exchanges need as many answers as questions, and one at least: {lengths}")
        woven = np.stack((self.sent, self.received), axis=1).reshape(-1)
        steps = np.diff(woven)
        if (steps < 0).any():
            where = int(np.argmax(steps < 0))
            raise ClockError(f"the asking rank's clock went back by {-int(steps[where])} ns at exchange {where // 2}")

    def __len__(self) -> int:
        return len(self.sent)

    def part(self, first: int, last: int) -> Exchanges:
        """Exchanges first … last − 1."""
        chosen = slice(first, last)
        return Exchanges(self.sent[chosen], self.answered[chosen], self.received[chosen])

    def bounds(self) -> OffsetBounds:
        """The bounds that all exchanges together set to a constant offset."""
        low = int((self.answered - self.received).max())
        high = int((self.answered - self.sent).min())
        return OffsetBounds(low, high, int((self.received - self.sent).min()))


@dataclass(frozen=True, slots=True)
class OffsetBounds:
    """The offset of a clock lies in [low_ns, high_ns]. rtt_min_ns: the shortest round trip that was seen.

    Where low_ns > high_ns no constant offset explains the exchanges: a clock jumped, or one runs faster.
    """

    low_ns: int
    high_ns: int
    rtt_min_ns: int

    @property
    def consistent(self) -> bool:
        return self.low_ns <= self.high_ns

    @property
    def offset_s(self) -> float:
        """The midpoint."""
        return (self.low_ns + self.high_ns) * 0.5e-9

    @property
    def error_s(self) -> float:
        """The largest error of the midpoint: half the distance of the bounds, at most RTT_min / 2."""
        return abs(self.high_ns - self.low_ns) * 0.5e-9

    @property
    def same_clock(self) -> bool:
        """Whether offset 0 is possible. Two ranks that read one clock can never give False."""
        return self.low_ns <= 0 <= self.high_ns

    @property
    def largest_s(self) -> float:
        """The largest distance between the clocks that the bounds do not rule out."""
        return max(abs(self.low_ns), abs(self.high_ns)) * 1e-9


# ---- exchanging readings ------------------------------------------------------------------------------------


class Link(Protocol):
    """A two-way connection of this rank to one other, for one integer at a time."""

    def send(self, value: int) -> None: ...

    def receive(self) -> int:
        """Wait for the other's next integer."""
        ...


def ping_pong(link: Link, rounds: int = ROUNDS, clock: Clock = now_ns) -> Exchanges:
    """The asking side of ``rounds`` exchanges; the other side runs ``answer`` with as many."""
    sent, answered, received = (np.zeros(rounds, dtype=np.int64) for _ in range(3))
    send, receive = link.send, link.receive
    for i in range(rounds):
        start = clock()
        send(i)
        reading = receive()
        end = clock()
        sent[i], answered[i], received[i] = start, reading, end
    return Exchanges(sent, answered, received)


def answer(link: Link, rounds: int = ROUNDS, clock: Clock = now_ns) -> None:
    """The answering side: a reading of this rank's clock for each question."""
    send, receive = link.send, link.receive
    for _ in range(rounds):
        receive()
        send(clock())


class ProcessGroupLink:
    """Integers to and from ``peer`` (its global rank) over a torch process group on CPU tensors, such as gloo's."""

    def __init__(self, group: Any, peer: int) -> None:
        import torch
        import torch.distributed as dist

        self._dist, self._group, self._peer = dist, group, peer
        self._out, self._in = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    def send(self, value: int) -> None:
        self._out[0] = value
        self._dist.send(self._out, self._peer, group=self._group)

    def receive(self) -> int:
        self._dist.recv(self._in, self._peer, group=self._group)
        return int(self._in[0])


class PageLink:
    """Integers between rank 0 and rank ``other`` over the team's shared page. Made by both, between two barriers.

    A word carries twice the integer, plus one in every second round: value and signal are a single store, whatever the
    order in which a processor lets others see its stores. Integers must lie within ±2^62.
    """

    def __init__(self, team: PageTeam, other: int) -> None:
        question, reply = team.clock_words(other)
        self._team = team
        self._words = team._words
        self._peer = other if team.rank == 0 else 0
        self._out, self._in = (question, reply) if team.rank == 0 else (reply, question)
        self._sent = self._received = 0
        self._words[self._out] = 0

    def send(self, value: int) -> None:
        self._sent ^= 1
        self._words[self._out] = 2 * value + self._sent

    def receive(self) -> int:
        self._received ^= 1
        words, slot, wanted, spins = self._words, self._in, self._received, 0
        start = time.monotonic()
        while (word := words[slot]) & 1 != wanted:
            spins += 1
            if self._team.oversubscribed or spins > 2000:
                os.sched_yield()
            if spins % 64 == 0:
                self._team.check_peer(self._peer, start, _LIMIT_S)
        return word >> 1


class Clocks(Protocol):
    """What is known of a team's clocks. ok: times of different ranks may be subtracted."""

    @property
    def ok(self) -> bool: ...

    @property
    def largest_s(self) -> float:
        """What times of different ranks can be wrong by against each other."""
        ...

    def verdict(self) -> str:
        """One line for a person."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """For the manifest."""
        ...


# ---- one host: do the ranks read one clock? -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClockAgreement:
    """The clocks of a team against rank 0's: bounds per rank, in rank order (rank 0's own are 0)."""

    bounds: tuple[OffsetBounds, ...]

    @property
    def differing(self) -> tuple[int, ...]:
        """The ranks that cannot read rank 0's clock."""
        return tuple(rank for rank, b in enumerate(self.bounds) if not (b.consistent and b.same_clock))

    @property
    def ok(self) -> bool:
        return not self.differing

    @property
    def largest_s(self) -> float:
        """How far apart from rank 0's any clock can be, as far as the exchanges tell."""
        return max(b.largest_s for b in self.bounds)

    def verdict(self) -> str:
        """One line for a person: that the clocks agree and how well that is known, or which rank's differs."""
        if self.ok:
            return f"the clocks of {len(self.bounds)} ranks agree within {format_time(self.largest_s)}"
        said = []
        for rank in self.differing:
            b = self.bounds[rank]
            if not b.consistent:
                apart = format_time((b.low_ns - b.high_ns) * 1e-9)
                said.append(f"rank {rank}'s clock jumped against rank 0's by at least {apart} while they were compared")
                continue
            side = "ahead of" if b.low_ns > 0 else "behind"
            distance = f"{format_time(abs(b.offset_s))} (± {format_time(b.error_s)})"
            said.append(f"rank {rank}'s clock is {distance} {side} rank 0's")
        return (
            "; ".join(said) + ": times of different ranks cannot be subtracted; start all ranks on one host and in one "
            "time namespace"
        )

    def to_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "ok": self.ok,
            "largest_s": self.largest_s,
            "verdict": self.verdict(),
            "ranks": [
                {"rank": r, "low_ns": b.low_ns, "high_ns": b.high_ns, "rtt_min_ns": b.rtt_min_ns}
                for r, b in enumerate(self.bounds)
            ],
        }


def agreement(team: PageTeam, rounds: int = ROUNDS, clock: Clock = now_ns) -> ClockAgreement:
    """Compare every rank's clock with rank 0's over the shared page; the same result on every rank.

    Collective. Raises PointFailed or PeerLost as ``team.barrier`` does, and ClockError on every rank where rank 0's
    clock goes back.
    """
    found = [OffsetBounds(0, 0, 0)]
    for other in range(1, team.size):
        link = PageLink(team, other) if team.rank in (0, other) else None
        team.barrier()  # both ends of the link are clear
        low = high = rtt = back = 0
        if link is not None and team.rank == 0:
            try:
                bounds = ping_pong(link, rounds, clock).bounds()
                low, high, rtt = bounds.low_ns, bounds.high_ns, bounds.rtt_min_ns
            except ClockError as error:
                back = 1
                problem = error
        elif link is not None:
            answer(link, rounds, clock)
        low, high, rtt, back = team.from_first(low, high, rtt, back)
        if back:
            raise problem if team.rank == 0 else ClockError("rank 0's clock went back while clocks were compared")
        found.append(OffsetBounds(low, high, rtt))
    return ClockAgreement(tuple(found))


# ---- across hosts: offset over time -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OffsetLine:
    """offset(t) = intercept_ns + fraction_s + slope · (t − reference_ns), with t on the local clock.

    Fitted to the midpoint of the shortest exchange of each window. times_s (after reference_ns), residuals_s and
    errors_s (half that exchange's round trip) are arrays (windows,). If both clocks run evenly, the line is within
    ``error_s(t)`` of the true offset.
    """

    reference_ns: int
    intercept_ns: int
    fraction_s: float
    slope: float
    times_s: NDArray[np.float64]
    residuals_s: NDArray[np.float64]
    errors_s: NDArray[np.float64]

    @property
    def intercept_s(self) -> float:
        return self.intercept_ns * 1e-9 + self.fraction_s

    def offset_s(self, local_ns: int) -> float:
        """The offset at a moment of the local clock, in seconds."""
        return self.intercept_s + self.slope * ((local_ns - self.reference_ns) * 1e-9)

    def error_s(self, local_ns: int | None = None) -> float:
        """The bound of the line's error at a moment (default: the worst moment from the first window to the last).

        The fitted value is Σ w_i · midpoint_i with the weights of least squares, and midpoint_i is off by errors_i at
        most, so the error is at most Σ |w_i| · errors_i (times 1 + slope, as the reading's moment is itself uncertain).
        """
        if local_ns is None:
            return max(self._error_at(float(self.times_s[0])), self._error_at(float(self.times_s[-1])))
        return self._error_at((local_ns - self.reference_ns) * 1e-9)

    def _error_at(self, t: float) -> float:
        centred = self.times_s - self.times_s.mean()
        weights = 1 / len(centred) + (t - self.times_s.mean()) * centred / float(centred @ centred)
        return float(np.abs(weights) @ self.errors_s) * (1 + abs(self.slope))

    @property
    def slope_error(self) -> float:
        """The bound of the slope's error, dimensionless."""
        centred = self.times_s - self.times_s.mean()
        return float(np.abs(centred) @ self.errors_s / (centred @ centred)) * (1 + abs(self.slope))

    @property
    def jumped(self) -> bool:
        """Whether a residual is larger than errors allow if both clocks ran evenly: then no line describes them."""
        allowed = [self._error_at(float(t)) for t in self.times_s] + self.errors_s * (1 + abs(self.slope))
        return bool((np.abs(self.residuals_s) > allowed + 1e-9).any())

    def to_local(self, remote_ns: Readings) -> Readings:
        """Readings of the remote clock as the local clock would have shown them, in nanoseconds."""
        # remote = local + offset(local), solved for local; what is left after the integers is small enough for a float
        distance = np.asarray(remote_ns, dtype=np.int64) - (self.reference_ns + self.intercept_ns)
        local = (distance - self.fraction_s * 1e9) / (1 + self.slope)
        return np.asarray(self.reference_ns + np.rint(local).astype(np.int64))

    def to_dict(self) -> dict[str, Any]:
        """For the manifest: the line, its error and the residuals that it leaves."""
        return {
            "reference_ns": self.reference_ns,
            "intercept_s": self.intercept_s,
            "slope": self.slope,
            "error_s": self.error_s(),
            "jumped": self.jumped,
            "residuals_s": [float(r) for r in self.residuals_s],
        }


def fit_offset(windows: Sequence[Exchanges]) -> OffsetLine:
    """A line through the offsets of several windows of exchanges, taken at different times, oldest first.

    Raises ValueError for fewer than three windows, or windows that are not one after another.
    """
    if len(windows) < FEWEST_WINDOWS:
        raise ValueError(f"a line with residuals needs {FEWEST_WINDOWS} windows of exchanges, not {len(windows)}")
    shortest = [int(np.argmin(w.received - w.sent)) for w in windows]
    sent = np.array([w.sent[i] for w, i in zip(windows, shortest, strict=True)], dtype=np.int64)
    answered = np.array([w.answered[i] for w, i in zip(windows, shortest, strict=True)], dtype=np.int64)
    received = np.array([w.received[i] for w, i in zip(windows, shortest, strict=True)], dtype=np.int64)
    if (sent[1:] <= received[:-1]).any():
        raise ValueError("windows of exchanges must follow one another, oldest first")
    reference, base = int(sent[0]), int(answered[0] - sent[0])
    times = ((sent - reference) + (received - sent) / 2) * 1e-9
    offsets = ((answered - sent - base) - (received - sent) / 2) * 1e-9
    errors = np.asarray((received - sent) * 0.5e-9, dtype=np.float64)
    centred = times - times.mean()
    slope = float(centred @ (offsets - offsets.mean()) / (centred @ centred))
    fraction = float(offsets.mean() - slope * times.mean())
    residuals = offsets - fraction - slope * times
    return OffsetLine(reference, base, fraction, slope, times, residuals, errors)


# Two clocks drift apart by less: Linux slews each by at most 500 ppm (adjtimex), crystals differ by some 50 ppm.
LARGEST_DRIFT = 1.1e-3


@dataclass(frozen=True, slots=True)
class Correction:
    """How another rank's clock reads on the local one: the newest window's midpoint, carried on along a slope.

    offset(t) = offset_ns + slope · (t − at_ns), with t on the local clock. The error grows with the distance from the
    window: error_s + slope_error · distance.
    """

    at_ns: int = 0
    offset_ns: int = 0
    slope: float = 0.0
    error_s: float = 0.0
    slope_error: float = 0.0

    def to_local(self, remote_ns: Readings) -> Readings:
        """Readings (int64 array of any shape, nanoseconds) of the other clock as the local one would have shown."""
        reference = self.at_ns + self.offset_ns  # what the other clock showed at at_ns
        distance = np.asarray(remote_ns, dtype=np.int64) - reference
        return np.asarray(self.at_ns + np.rint(distance / (1 + self.slope)).astype(np.int64))

    def to_remote(self, local_ns: int) -> int:
        """What the other clock shows when the local one shows ``local_ns``."""
        return local_ns + self.offset_ns + round(self.slope * (local_ns - self.at_ns))

    def error_at(self, local_ns: int) -> float:
        return self.error_s + self.slope_error * abs(local_ns - self.at_ns) * 1e-9


def correction(windows: Sequence[Exchanges]) -> tuple[Correction, OffsetLine | None]:
    """From windows of exchanges, oldest first: how to read the other clock now, and the line through all of them.

    Fewer than FEWEST_WINDOWS give no line (None), and then the slope may be anything up to LARGEST_DRIFT; so it may
    where the line's own slope is known no better. Raises ValueError for no window.
    """
    if not windows:
        raise ValueError("no window of exchanges to correct a clock by")
    newest = windows[-1]
    bounds = newest.bounds()
    line = fit_offset(windows) if len(windows) >= FEWEST_WINDOWS else None
    known = line is not None and line.slope_error < LARGEST_DRIFT and abs(line.slope) < LARGEST_DRIFT
    slope, slope_error = (line.slope, line.slope_error) if line is not None and known else (0.0, LARGEST_DRIFT)
    # a window whose bounds cross saw the offset move while it lasted: half its round trip still bounds one reading
    error_s = max(bounds.error_s, 0.0) if bounds.consistent else bounds.error_s + bounds.rtt_min_ns * 0.5e-9
    at = int(newest.sent[0] + (newest.received[-1] - newest.sent[0]) // 2)
    return Correction(at, (bounds.low_ns + bounds.high_ns) // 2, slope, error_s, slope_error), line


# ---- what an offset's error means for a latency ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TimesAcross:
    """Whether times of different hosts may be subtracted at one latency. local: use the maximum over ranks of local
    durations instead; ``reason`` then says why, for the point's reason (else "")."""

    local: bool
    reason: str = ""


def times_across(error_s: float, latency_s: float) -> TimesAcross:
    """The rule: an offset error of more than 5 % of the latency forbids subtracting times of different hosts.

    error_s: RTT_min / 2, or the error of a line. A latency that is not positive forbids it too.
    """
    if latency_s > 0 and error_s <= LARGEST_ERROR_SHARE * latency_s:
        return TimesAcross(local=False)
    share = f"{error_s / latency_s:.0%}" if latency_s > 0 and math.isfinite(error_s) else "no known part"
    return TimesAcross(
        local=True,
        reason=f"the clocks of the hosts are known to {format_time(error_s)}, {share} of the latency and more than "
        f"{LARGEST_ERROR_SHARE:.0%}: it is the maximum over ranks of local durations",
    )
