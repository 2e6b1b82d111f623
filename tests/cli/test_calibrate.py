"""``commbench calibrate`` on this machine."""

from __future__ import annotations

import json
from typing import Any

import pytest


@pytest.mark.slow
def test_it_judges_this_machine_and_its_answers_are_near_the_script(process: Any) -> None:
    started = process("calibrate", "--launches", "2", "--json")
    out, err = started.communicate(timeout=150)
    assert started.returncode in (0, 1), err
    result = json.loads(out)
    assert result["launches"] == 2
    assert {(a["loop"], a["scripted_s"]) for a in result["known_answers"]} == {
        (loop, duration) for loop in ("python", "native") for duration in (1e-6, 1e-5, 1e-3)
    }
    for answer in result["known_answers"]:
        # a busy machine adds to a wait; what it adds to the empty iteration is subtracted, which only 1 µs feels
        if answer["scripted_s"] > 5e-6:
            assert answer["reported_s"] > 0.9 * answer["scripted_s"]
    assert set(result["launches_needed"]) == {"1%", "5%", "20%"}


def test_bad_input_is_refused_in_one_line(commbench: Any) -> None:
    for args in (["--launches", "1"], ["--tp", "1"], ["--tp", "x"]):
        code, out, err = commbench("calibrate", *args)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
