"""Defaults that never override the user's, and versions that are asserted."""

from __future__ import annotations

import pytest

from commbench import Engine
from commbench.errors import EngineError
from commbench.harness.environment.kernel_packages import DEFAULTS, check_versions, defaults_for, left_alone

GOOD = {"flashinfer-python": "0.4.0rc3", "sgl-kernel": "0.3.14"}


def test_defaults_are_set_only_where_the_user_has_set_nothing() -> None:
    assert defaults_for({}) == DEFAULTS
    mine = {"TRTLLM_ENABLE_PDL": "0", "CUTE_DSL_LOG_LEVEL": "10"}
    assert defaults_for(mine) == {"CUTE_DSL_LOG_TO_CONSOLE": "1"}
    assert "TRTLLM_ENABLE_PDL" not in defaults_for({"TRTLLM_ENABLE_PDL": ""})


def test_a_value_that_the_engine_would_replace_is_told() -> None:
    (told,) = left_alone({"TRTLLM_ENABLE_PDL": "yes"})
    assert told == "TRTLLM_ENABLE_PDL='yes' is left as you set it; SGLang 0.5.3 would make it '1'"
    assert left_alone({}) == left_alone({"TRTLLM_ENABLE_PDL": "0"}) == left_alone({"TRTLLM_ENABLE_PDL": "1"}) == []


def test_an_older_kernel_package_is_named_with_both_versions_and_the_command() -> None:
    check_versions({}, {})
    check_versions(GOOD, {})
    check_versions({"flashinfer-python": "0.4.0", "sgl-kernel": "0.3.14.post1"}, {})
    with pytest.raises(EngineError) as told:
        check_versions({**GOOD, "flashinfer-python": "0.4.0rc1"}, {})
    assert str(told.value) == (
        "flashinfer-python 0.4.0rc1 is older than the 0.4.0rc3 that SGLang 0.5.3 needs: "
        'pip install "flashinfer-python==0.4.0rc3"; or set COMMBENCH_SKIP_VERSION_CHECK=1 to skip this check'
    )
    with pytest.raises(EngineError, match=r"sgl-kernel 0\.3\.9 is older than the 0\.3\.14"):
        check_versions({**GOOD, "sgl-kernel": "0.3.9"}, {})
    check_versions({**GOOD, "sgl-kernel": "0.3.9"}, {"COMMBENCH_SKIP_VERSION_CHECK": "1"})


def test_the_ranks_of_an_engine_have_the_defaults(engine: Engine) -> None:
    import psutil

    for pid in engine.pids:
        environment = psutil.Process(pid).environ()
        assert {name: environment.get(name) for name in DEFAULTS} == DEFAULTS
