"""Estimates and tests of many series at once, held against scipy and against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.analysis.effects import (
    against_nights,
    benjamini_hochberg,
    changed_p,
    hodges_lehmann,
    holm,
    paired,
    prior_variance,
    row_medians,
    sign_flip_p,
    welch,
)


def sides(seed: int, rows: int = 6, base: int = 7, cand: int = 9) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 0.03, (rows, base)), rng.normal(0.02, 0.05, (rows, cand))


def test_welch_gives_what_scipy_gives() -> None:
    from scipy import stats

    base, cand = sides(1)
    effects = welch(base, cand)
    for i in range(len(base)):
        other = stats.ttest_ind(cand[i], base[i], equal_var=False, alternative="greater")
        assert effects.p_slower(0.0)[i] == pytest.approx(other.pvalue, rel=1e-9)
        interval = stats.ttest_ind(cand[i], base[i], equal_var=False).confidence_interval(0.95)
        low, high = effects.interval()
        assert (low[i], high[i]) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_paired_gives_what_scipy_gives() -> None:
    from scipy import stats

    base, cand = sides(2, base=8, cand=8)
    effects = paired(base, cand)
    for i in range(len(base)):
        other = stats.ttest_1samp(cand[i] - base[i], 0.01, alternative="greater")
        assert effects.p_slower(0.01)[i] == pytest.approx(other.pvalue, rel=1e-9)


def test_launches_that_are_not_there_do_not_count() -> None:
    base, cand = sides(3)
    holed = np.concatenate([base, np.full((len(base), 3), np.nan)], axis=1)
    assert np.allclose(welch(holed, cand).se, welch(base, cand).se)
    assert (welch(holed, cand).n_base == base.shape[1]).all()


def test_a_pair_counts_where_both_launches_have_a_number() -> None:
    base, cand = np.array([[0.0, 0.1, np.nan, 0.3]]), np.array([[0.1, np.nan, 0.2, 0.5]])
    effects = paired(base, cand)
    assert effects.n_base[0] == 2
    assert effects.estimate[0] == pytest.approx(0.15)


def test_one_launch_gives_an_estimate_but_no_error() -> None:
    effects = welch(np.array([[0.0]]), np.array([[0.1, 0.2]]))
    assert effects.estimate[0] == pytest.approx(0.15)
    assert np.isnan(effects.interval()[0][0])
    assert np.isnan(effects.p_slower(0.0)[0])


def test_without_any_scatter_the_sign_decides() -> None:
    base = np.zeros((2, 5))
    effects = welch(base, base + np.array([[0.05], [0.005]]))
    assert effects.p_slower(0.01).tolist() == [0.0, 1.0]


def test_the_interval_of_one_night_against_earlier_ones_covers_the_truth() -> None:
    """The candidate night has a level of its own; the error must hold it. Nominal 95 %, over 4,000 series."""
    rng = np.random.default_rng(4)
    series, nights, launches, night_sd, launch_sd = 4000, 12, 5, 0.02, 0.03
    earlier = rng.normal(0, night_sd, (series, nights, 1)) + rng.normal(0, launch_sd, (series, nights, launches))
    tonight = rng.normal(0, night_sd, (series, 1)) + rng.normal(0, launch_sd, (series, launches))
    effects = against_nights(
        earlier.mean(axis=2), np.full((series, nights), launches), earlier.var(axis=2, ddof=1), tonight
    )
    low, high = effects.interval()
    covered = float(((low <= 0) & (high >= 0)).mean())
    assert 0.94 <= covered <= 0.985


def test_a_night_of_fewer_launches_than_usual_is_less_certain() -> None:
    rng = np.random.default_rng(5)
    earlier = rng.normal(0, 0.03, (1, 12, 8))
    facts = earlier.mean(axis=2), np.full((1, 12), 8), earlier.var(axis=2, ddof=1)
    few, many = (against_nights(*facts, rng.normal(0, 0.03, (1, n))) for n in (2, 8))
    assert few.se[0] > many.se[0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_rejects_what_its_definition_rejects(p_values: list[float]) -> None:
    alpha = 0.05
    adjusted = holm(np.array(p_values))
    rejected = set()
    for step, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[index] > alpha / (len(p_values) - step):
            break
        rejected.add(p_values[index])
    by_adjusted = {p for p, a in zip(p_values, adjusted, strict=True) if a <= alpha}
    # dividing and multiplying round differently at the very edge
    edge = {p for p, a in zip(p_values, adjusted, strict=True) if abs(a - alpha) < 1e-12}
    assert rejected - edge == by_adjusted - edge


def test_adjusted_p_values_leave_out_what_was_not_tested() -> None:
    p = np.array([0.01, np.nan, 0.04])
    assert holm(p)[0] == pytest.approx(0.02)
    assert np.isnan(holm(p)[1])
    assert np.isnan(benjamini_hochberg(p)[1])


def test_false_discovery_rates_are_those_of_scipy() -> None:
    from scipy import stats

    p = np.random.default_rng(6).uniform(0, 1, 40) ** 3
    assert benjamini_hochberg(p) == pytest.approx(stats.false_discovery_control(p))


def test_hodges_lehmann_is_the_median_of_all_differences() -> None:
    base, cand = sides(7)
    found = hodges_lehmann(base, cand, in_pairs=False)
    for i in range(len(base)):
        assert found[i] == pytest.approx(np.median([c - b for b, c in itertools.product(base[i], cand[i])]))


def test_hodges_lehmann_of_pairs_is_the_median_of_walsh_averages() -> None:
    base, cand = sides(8, base=6, cand=6)
    found = hodges_lehmann(base, cand, in_pairs=True)
    for i in range(len(base)):
        d = cand[i] - base[i]
        walsh = [(a + b) / 2 for a, b in itertools.combinations_with_replacement(d, 2)]
        assert found[i] == pytest.approx(np.median(walsh))


def test_an_outlying_launch_does_not_move_hodges_lehmann() -> None:
    base, cand = np.zeros((1, 9)), np.zeros((1, 9))
    cand[0, 0] = 5.0
    assert hodges_lehmann(base, cand, in_pairs=False)[0] == 0.0


def test_a_sign_flip_test_needs_fourteen_pairs() -> None:
    assert math.isnan(sign_flip_p(np.full(13, 0.1), 0.01))
    assert sign_flip_p(np.full(14, 0.1), 0.01) == pytest.approx(2**-14)


def test_a_sign_flip_test_of_many_pairs_is_random_but_repeatable() -> None:
    d = np.random.default_rng(9).normal(0.01, 0.05, 25)
    assert sign_flip_p(d, 0.0) == sign_flip_p(d, 0.0)
    from scipy import stats

    assert sign_flip_p(d, 0.0) == pytest.approx(stats.ttest_1samp(d, 0, alternative="greater").pvalue, abs=0.02)


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-5, 5) | st.just(math.nan), min_size=5, max_size=5), min_size=1, max_size=6))
def test_row_medians_are_those_of_numpy(rows: list[list[float]]) -> None:
    values = np.array(rows)
    expected = [np.median(r[np.isfinite(r)]) if np.isfinite(r).any() else math.nan for r in values]
    assert row_medians(values) == pytest.approx(expected, nan_ok=True)


def test_power_is_what_was_promised() -> None:
    """``smallest_found`` says which slowdown is found with 80 % power; simulated for ten launches a side."""
    rng = np.random.default_rng(10)
    cv, launches, margin, alpha = 0.03, 10, 0.01, 0.01
    probe = welch(rng.normal(0, cv, (2000, launches)), rng.normal(0, cv, (2000, launches)))
    reach = float(np.median(probe.smallest_found(margin, alpha)))
    effects = welch(rng.normal(0, cv, (4000, launches)), rng.normal(reach, cv, (4000, launches)))
    assert 0.75 <= (effects.p_slower(margin) <= alpha).mean() <= 0.88


# ---- many series at once --------------------------------------------------------------------------------------------


def test_one_series_has_the_p_of_all_ways_to_share_its_launches_out() -> None:
    rng = np.random.default_rng(4)
    base, cand = rng.normal(0, 1, (1, 5)), rng.normal(1, 1, (1, 5))
    together = np.concatenate([base, cand], axis=1)[0]
    every = [together[list(own)].sum() for own in itertools.combinations(range(10), 5)]
    exact = np.mean([total >= cand.sum() - 1e-12 for total in every])
    assert changed_p(base, cand)[0] == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize("common", [0.0, 0.05])
def test_among_series_that_did_not_change_one_is_found_as_seldom_as_the_level_says(common: float) -> None:
    """Also where all series of a launch share a factor; 300 nights of 30 series, 5 %."""
    rng = np.random.default_rng(6)
    red = 0
    for _ in range(300):
        base, cand = rng.normal(0, 0.05, (2, 30, 8)) + common * rng.normal(0, 1, (2, 1, 8))
        red += changed_p(base, cand).min() <= 0.05
    assert 2 <= red <= 25  # 15 expected; 99 % of binomial draws


def test_the_variance_of_one_series_is_told_by_all_where_they_are_alike() -> None:
    """Two standard deviations slower, one of 300 series: a t on its own launches finds it in less than half."""
    rng = np.random.default_rng(7)
    found, alone = [], []
    for _ in range(30):
        base, cand = rng.normal(0, 0.05, (2, 300, 10))
        cand[3] += 0.1
        found.append(changed_p(base, cand)[3] <= 0.025)
        alone.append(holm(welch(base, cand).p_slower(0.0))[3] <= 0.025)
    assert np.mean(found) >= 0.6
    assert np.mean(found) >= np.mean(alone) + 0.15


def test_it_is_told_by_half_of_them_where_the_other_half_lacks_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def kept(variances: np.ndarray, df: float) -> tuple[float, float]:
        asked.append((len(variances), df))
        return prior_variance(variances, df)

    monkeypatch.setattr("commbench.analysis.effects.prior_variance", kept)
    base, cand = np.random.default_rng(7).normal(0, 0.05, (2, 20, 10))
    base[10:, 0] = np.nan
    changed_p(base, cand)
    assert asked == [(10, 17.0)]


def test_adjusted_p_values_come_in_the_order_of_the_changes() -> None:
    rng = np.random.default_rng(8)
    base, cand = rng.normal(0, 0.05, (2, 40, 10))
    cand += np.linspace(0, 0.3, 40)[:, None]
    p = changed_p(base, cand)
    assert p[-1] <= 0.002
    assert p[30:].max() <= 0.01
    assert p[:3].min() >= 0.1


def test_launches_that_are_missing_and_series_without_scatter_are_coped_with() -> None:
    rng = np.random.default_rng(9)
    base, cand = rng.normal(0, 0.05, (2, 20, 10))
    base[0, :3] = np.nan
    base[1], cand[1] = 1.0, 1.0
    p = changed_p(base, cand)
    assert np.isfinite(p).all()
    assert p[1] > 0.5
    assert changed_p(np.empty((0, 10)), np.empty((0, 10))).shape == (0,)


def test_what_all_variances_say_of_one() -> None:
    rng = np.random.default_rng(10)
    alike = 4.0 * rng.chisquare(18, 5000) / 18
    df, variance = prior_variance(alike, 18)
    assert df > 300
    assert variance == pytest.approx(4.0, rel=0.02)
    true = 4.0 * 6 / rng.chisquare(6, 20000)  # scaled inverse chi-squared on 6 degrees of freedom
    df, variance = prior_variance(true * rng.chisquare(18, 20000) / 18, 18)
    assert df == pytest.approx(6, rel=0.1)
    assert variance == pytest.approx(4.0, rel=0.05)
    assert prior_variance(np.zeros(5), 18)[0] == 0
