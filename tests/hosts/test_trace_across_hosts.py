"""A traced sweep on two hosts that are namespaces of this machine: one trace with the ranks of both."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from commbench.harness.views.trace_file import listed
from tests.hosts.commands import assert_nothing_is_left, ended, start
from tests.hosts.machines import hosts, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"needs hosts made of namespaces: {WHY_NOT}"),
]


def test_the_first_hosts_trace_has_the_ranks_of_both_and_each_adds_up(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with hosts(2) as made:
        options = ["--collectives", "all_reduce", "--sizes", "1KiB", "--trace", "--bind", "none"]
        (code, said), (other_code, other_said) = ended(start(made, 2, out, *options))
        assert_nothing_is_left(made)
    assert code == 0, said
    assert other_code == 0, other_said
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(names) == {"sweep on hosta", "launch-0.rank-0 on hosta", "launch-0.rank-1 on hostb"}
    (launch,) = [e for e in events if e["name"] == "launch"]
    for label in ("launch-0.rank-0 on hosta", "launch-0.rank-1 on hostb"):
        own = [e for e in events if e["pid"] == names[label] and e["ph"] == "X"]
        assert {"rank", "starting", "calibrating", "visit", "sampling"} <= {e["name"] for e in own}
        (rank,) = [e for e in own if e["name"] == "rank"]
        assert rank["args"]["parent_id"] == launch["args"]["span_id"]
        assert launch["ts"] < rank["ts"] < rank["ts"] + rank["dur"] < launch["ts"] + launch["dur"]
    shares = [int(found) for line in listed(out) for found in re.findall(r"adds up to (\d+)%", line)]
    assert len(shares) == 2
    assert all(90 <= share <= 100 for share in shares), listed(out)
