"""Points: what identifies them."""

from dataclasses import replace

from commbench.types import COLLECTIVES, DTYPES, Point

POINT = Point("all_reduce", "sum", "float32", 1024, 2)


def test_a_point_id_is_stable_between_processes_and_versions() -> None:
    # a literal: stored runs and histories are compared by it
    assert POINT.point_id == "a7472176e088a3c0"


def test_everything_that_a_point_is_changes_its_id() -> None:
    others = [
        replace(POINT, collective="reduce"), replace(POINT, op="max"), replace(POINT, dtype="int32"),
        replace(POINT, size_bytes=2048), replace(POINT, world_size=4), replace(POINT, layout="strided"),
        replace(POINT, group="tp"), replace(POINT, backend="fake"), replace(POINT, policy="vllm-0.33"),
        replace(POINT, mode="graph"), replace(POINT, cache="cold"), replace(POINT, placement="out"),
    ]  # fmt: skip
    assert len({p.point_id for p in [POINT, *others]}) == len(others) + 1


def test_the_key_ignores_policy_and_requested_backend_only() -> None:
    assert replace(POINT, backend="fake", policy="x").point_key == POINT.point_key
    assert replace(POINT, cache="cold").point_key != POINT.point_key


def test_a_point_survives_being_written_and_read() -> None:
    assert Point.from_dict(POINT.to_dict()) == POINT


def test_a_label_names_what_is_unusual() -> None:
    text = replace(POINT, op="max", layout="strided", placement="out").label()
    assert text == "all_reduce max float32 1 KiB strided out-place [auto]"


def test_every_dtype_and_collective_goes_by_its_own_name() -> None:
    assert all(name == dtype.name for name, dtype in DTYPES.items())
    assert all(name == collective.name for name, collective in COLLECTIVES.items())
