"""How often the gate is wrong, by simulation on its own code. The figures of docs/gate.md come from here.

    python -m tests.perf.gate_simulation            # all figures, some minutes
    python -m tests.perf.gate_simulation --nights 50

Launch medians are log-normal: a factor of the launch (shared by all points), and one of the point in that launch.
``cv`` is their scatter together; half of its variance is shared unless said otherwise.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from commbench.analysis.changepoints import change_points
from commbench.analysis.compare import Aligned, Comparison, Nights, align, compare_aligned, compare_with_nights
from commbench.analysis.gate import FEWEST_PAIRS, Judgement, Rule, Status, judge, screen
from commbench.store.latencies import COLUMNS
from commbench.types import COLLECTIVES, Point

SERIES = 500


def series(count: int = SERIES) -> list[Point]:
    """Points in families of about eight: 5 collectives × backends × sizes."""
    names = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
    sizes = [8 << k for k in range(20)]
    points = [
        Point(c, "sum" if COLLECTIVES[c].reduces else "", "float32", s, 2, backend=f"backend{b}",
              placement=COLLECTIVES[c].placements[0])
        for b in range(5) for c in names for s in sizes
    ]  # fmt: skip
    return points[:count]


def frame(points: list[Point], launches: int) -> pd.DataFrame:
    """The points as a side of ``launches`` launches, all of 1 s; the simulation then puts its own numbers in."""
    rows = [
        {**p.to_dict(), "backend_requested": p.backend, "backend_picked": p.backend, "point_id": p.point_id,
         "point_key": p.point_key, "launch": k, "sync": "window", "timing": "single", "status": "ok", "reason": "",
         "latency_median_s": 1.0, "latency_ci_low_s": 0.99, "latency_ci_high_s": 1.01}
        for p in points for k in range(launches)
    ]  # fmt: skip
    return pd.DataFrame(rows).reindex(columns=list(COLUMNS))


@dataclass(frozen=True)
class World:
    """How launch medians scatter. shared: part of the variance that all points of a launch have in common. unlike:
    standard deviation over points of the logarithm of their own scatter (0: all have the same)."""

    cv: float = 0.02
    shared: float = 0.5
    heavy: float = 0.0  # share of launches that are 20 % slower
    unlike: float = 0.0

    def draw(self, rng: np.random.Generator, points: int, launches: int) -> np.ndarray:
        common = rng.normal(0, self.cv * math.sqrt(self.shared), launches)
        own = rng.normal(0, self.cv * math.sqrt(1 - self.shared), (points, launches))
        own *= np.exp(np.random.default_rng(points).normal(0, self.unlike, points))[:, None]
        slow = math.log(1.2) * (rng.random((points, launches)) < self.heavy)
        return common + own + slow


def with_numbers(template: Aligned, base: np.ndarray, cand: np.ndarray, in_pairs: bool) -> Comparison:
    points = template.points.assign(base_s=np.exp(base.mean(axis=1)), cand_s=np.exp(cand.mean(axis=1)))
    return compare_aligned(Aligned(points, base, cand), in_pairs=in_pairs)


def stored_night(
    template: Aligned, world: World, rng: np.random.Generator, rule: Rule, shift: np.ndarray, launches: int
) -> Judgement:
    n = len(template.points)
    base, cand = world.draw(rng, n, launches), world.draw(rng, n, launches) + shift[:, None]
    return judge(with_numbers(template, base, cand, False), rule)


def ab_night(
    template: Aligned, world: World, rng: np.random.Generator, rule: Rule, shift: np.ndarray, launches: int
) -> Judgement:
    """Screen, and confirm the suspects on fresh launches; as ``gate --ab`` does."""
    n = len(template.points)
    first = with_numbers(template, world.draw(rng, n, launches), world.draw(rng, n, launches) + shift[:, None], True)
    suspects = screen(first, rule)
    if not suspects:
        return judge(first, rule, confirmation=(suspects, None))
    base, cand = world.draw(rng, n, launches), world.draw(rng, n, launches) + shift[:, None]
    kept = template.points["point_id"].isin(suspects.relaunch).to_numpy()
    small = replace(template, points=template.points[kept].reset_index(drop=True))
    second = with_numbers(small, base[kept], cand[kept], True)
    return judge(first, rule, confirmation=(suspects, second))


def history_night(
    points: pd.DataFrame, side: pd.DataFrame, world: World, rng: np.random.Generator, rule: Rule, shift: np.ndarray,
    launches: int, nights: int, night_cv: float,
) -> Judgement:  # fmt: skip
    """One night against ``nights`` earlier ones, each with a level of its own (night_cv) for every point."""
    n = len(points)
    draws = [world.draw(rng, n, launches) + rng.normal(0, night_cv, n)[:, None] for _ in range(nights)]
    means = np.stack([d.mean(axis=1) for d in draws], axis=1)
    variances = np.stack([d.var(axis=1, ddof=1) for d in draws], axis=1)
    tonight = world.draw(rng, n, launches) + (rng.normal(0, night_cv, n) + shift)[:, None]
    cand = side.assign(latency_median_s=np.exp(tonight).reshape(-1))
    comparison = compare_with_nights(Nights(points, means, np.full(means.shape, launches), variances), cand)
    return judge(comparison, rule)


def nights_of(form: str, count: int, world: World, shift: np.ndarray, launches: int, points: list[Point], seed: int,
              night_cv: float = 0.01) -> Iterator[Judgement]:  # fmt: skip
    """``count`` judgements of one form: ab, stored or history (of 30 nights)."""
    rng = np.random.default_rng(seed)
    side = frame(points, launches)
    template = align(side, side)
    rule = Rule(fewest=FEWEST_PAIRS) if form == "ab" else Rule()
    if form == "history":
        known = side.drop_duplicates("point_id").reset_index(drop=True)
        known = known.assign(picked=known["backend_picked"], how="window single")
    for _ in range(count):
        if form == "history":
            yield history_night(known, side, world, rng, rule, shift, launches, 30, night_cv)
        else:
            yield (ab_night if form == "ab" else stored_night)(template, world, rng, rule, shift, launches)


def red_share(judgements: Iterator[Judgement]) -> tuple[float, float]:
    """(share of red nights, share of inconclusive ones)."""
    found = [j.status for j in judgements]
    return found.count(Status.REGRESSION) / len(found), found.count(Status.INCONCLUSIVE) / len(found)


def power(form: str, count: int, world: World, excess_cv: float, launches: int, points: list[Point], whole: bool,
          seed: int) -> tuple[float, float]:  # fmt: skip
    """(share of nights that find a slowdown of margin + excess_cv × cv, share that accuse another family).

    whole: every point of one family is slower; else one point of it.
    """
    template = align(frame(points[:], 2), frame(points[:], 2))
    family = template.points["family"].iloc[7]
    own = (template.points["family"] == family).to_numpy()
    if not whole:
        own = np.arange(len(own)) == 7
    shift = np.where(own, math.log1p(Rule().margin) + excess_cv * world.cv, 0.0)
    hit = wrong = 0
    for judgement in nights_of(form, count, world, shift, launches, points, seed):
        red = {v.family for v in judgement.with_status(Status.REGRESSION)}
        hit += family in red
        wrong += bool(red - {family})
    return hit / count, wrong / count


def change_point_figures(series_count: int = 4000, tries: int = 200) -> tuple[int, dict[int, float]]:
    """(quiet series of 90 nights with a false change point, shift in standard deviations → median nights to find)."""
    rng = np.random.default_rng(0)
    false = sum(bool(change_points(rng.normal(0, 0.05, 90))) for _ in range(series_count))
    found = {}
    for shift in (2, 3):
        needed = []
        for _ in range(tries):
            logs = rng.normal(0, 0.05, 110)
            logs[90:] += shift * 0.05
            seen = (k for k in range(4, 21) if any(c.index >= 85 for c in change_points(logs[: 90 + k])))
            needed.append(next(seen, 99))
        found[shift] = float(np.median(needed))
    return false, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=200)
    nights = parser.parse_args().nights
    points = series()
    none = np.zeros(len(points))
    started = time.time()
    print(f"A/A, {nights} nights of {len(points)} series, 10 launches a side: share of red (inconclusive) nights")
    worlds = {
        "cv 2 %": World(0.02), "cv 5 %": World(0.05), "cv 10 %": World(0.10),
        "cv 10 %, points independent": World(0.10, shared=0.0),
        "cv 2 %, 5 % of launches +20 %": World(0.02, heavy=0.05),
        "cv 5 %, of points 2 to 13 %": World(0.05, shared=0.0, unlike=0.5),
    }  # fmt: skip
    for name, world in worlds.items():
        shares = {f: red_share(nights_of(f, nights, world, none, 10, points, 1)) for f in ("ab", "stored", "history")}
        print(f"  {name:32s}" + "".join(f"{f} {r:6.1%} ({i:.0%})   " for f, (r, i) in shares.items()), flush=True)
    print("power: share of nights that find a slowdown of margin + k × cv (cv 5 %), and that accuse another family")
    for form in ("ab", "stored", "history"):
        for whole in (True, False):
            for k in (1.5, 2.0, 2.5):
                count = max(20, nights // 4)
                found, wrong = power(form, count, World(0.05, shared=0.0), k, 10, points, whole, 2)
                what = "a whole family" if whole else "one point"
                print(f"  {form:8s} {what:15s} k = {k}: {found:4.0%}, {wrong:4.0%}", flush=True)
    false, needed = change_point_figures()
    print(
        f"change points: {false} false in 4000 quiet series of 90 nights; nights to find a shift, by its size: {needed}"
    )
    print(f"{time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
