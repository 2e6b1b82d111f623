"""Batches: the words of the input, what is defaulted, and what a bad row says."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from commbench.errors import UsageError
from commbench.policy import load_policy
from commbench.policy.batch import answer_file

HEADER = "arch,cc_major,world_size,requested,mode,dtype,size_bytes"
ROW = "cuda,9,8,ca_v1,eager,bfloat16,1024"


def ask(tmp_path: Path, text: str, policy: str = "sglang-0.5.3", name: str = "in.csv") -> list[dict[str, str]]:
    source, target = tmp_path / name, tmp_path / "out.csv"
    if name.endswith(".gz"):
        with gzip.open(source, "wt") as stream:
            stream.write(text)
    else:
        source.write_text(text)
    count = answer_file(load_policy(policy), source, target)
    with target.open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == count
    return rows


def test_every_row_gets_its_pick_and_the_reasons(tmp_path: Path) -> None:
    rows = ask(tmp_path, f"{HEADER}\n{ROW}\ncuda,9,8,ca_v1,graph,bfloat16,8388608\n")
    assert [r["picked"] for r in rows] == ["ca", "inplace"]
    assert "ca_v1: 8 MiB is not < 8 MiB" in rows[1]["reason"]


def test_a_compressed_file_is_read_too(tmp_path: Path) -> None:
    assert ask(tmp_path, f"{HEADER}\n{ROW}\n", name="in.csv.gz")[0]["picked"] == "ca"


def test_a_byte_order_mark_and_foreign_line_ends_do_no_harm(tmp_path: Path) -> None:
    assert ask(tmp_path, f"\ufeff{HEADER}\r\n{ROW}\r\n")[0]["picked"] == "ca"


def test_the_answers_in_a_recorded_file_are_not_read(tmp_path: Path) -> None:
    rows = ask(tmp_path, f"{HEADER},enabled,picked,kernel\n{ROW},qr,qr,qr\n")
    assert rows[0]["picked"] == "ca"
    assert set(rows[0]) == {*HEADER.split(","), "picked", "reason"}


def test_missing_columns_take_the_engines_defaults(tmp_path: Path) -> None:
    rows = ask(tmp_path, "arch,cc_major,world_size,dtype,size_bytes\ncuda,9,8,bfloat16,1024\n")
    assert rows[0]["picked"] == "ca"


@pytest.mark.parametrize(("columns", "cells", "picked"), [
    ("layout,contiguous", "strided,1", "ca"),
    ("layout,contiguous", "strided,0", "inplace"),
    ("contiguous", "0", "inplace"),
    ("layout", "dense_t", "ca"),
])  # fmt: skip
def test_a_tensor_that_is_contiguous_counts_as_such_whatever_its_strides(
    tmp_path: Path, columns: str, cells: str, picked: str
) -> None:
    assert ask(tmp_path, f"{HEADER},{columns}\n{ROW},{cells}\n")[0]["picked"] == picked


def test_an_exception_of_the_engine_is_its_pick(tmp_path: Path) -> None:
    rows = ask(tmp_path, f"{HEADER}\ncuda,9,4,pymscclpp,graph,bfloat16,1024\n")
    assert rows[0]["picked"] == "raise AttributeError"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arch,cc_major,world_size,dtype\ncuda,9,8,bfloat16\n", "the batch has no column 'size_bytes'"),
        ("", "the batch has no column 'arch'"),
        (f"{HEADER}\n{ROW}\ntpu,9,8,ca_v1,eager,bfloat16,1024\n", "in.csv, line 3: unknown arch 'tpu'"),
        (f"{HEADER}\ncuda,9,8,warp,eager,bfloat16,1024\n", "line 2: requested: unknown switch 'warp'"),
        (f"{HEADER}\ncuda,9,8,ca_v1,lazy,bfloat16,1024\n", "line 2: unknown mode 'lazy'"),
        (f"{HEADER}\ncuda,9,8,ca_v1,eager,complex64,1024\n", "line 2: unknown dtype 'complex64'"),
        (f"{HEADER}\ncuda,9,8,ca_v1,eager,bfloat16,many\n", "line 2: size_bytes 'many' is not a whole number"),
        (f"{HEADER}\ncuda,9,8,ca_v1,eager,bfloat16,1023\n", "size_bytes 1023 is not a multiple of bfloat16's 2"),
        (f"{HEADER}\ncuda,9,many,ca_v1,eager,bfloat16,1024\n", "line 2: world_size 'many' is not a whole number"),
        (f"{HEADER}\ncuda,9,0,ca_v1,eager,bfloat16,1024\n", "line 2: world_size is 0"),
        (f"{HEADER}\ncuda,,8,ca_v1,eager,bfloat16,1024\n", "line 2: cuda needs cc_major"),
        (f"{HEADER}\ncuda,9,8\n", "line 2: it has fewer cells than the header"),
        (f"{HEADER}\n{ROW},1\n", "line 2: it has more cells than the header"),
        (f"{HEADER},nvlink\n{ROW},maybe\n", "line 2: nvlink 'maybe' is neither 0 nor 1"),
        (f"{HEADER},layout\n{ROW},spiral\n", "line 2: unknown layout 'spiral'"),
        (f"{HEADER},shape\n{ROW},wide\n", "line 2: shape 'wide' is not like"),
        (f"{HEADER},qr_level\n{ROW},INT5\n", "line 2: parameter qr_level='INT5' is not one of NONE"),
    ],
)  # fmt: skip
def test_a_bad_batch_is_one_line_that_names_the_row_and_leaves_no_output(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        ask(tmp_path, text)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out.csv").exists()


def test_a_file_that_is_no_csv_is_named(tmp_path: Path) -> None:
    (tmp_path / "in.csv.gz").write_bytes(b"not compressed")
    with pytest.raises(UsageError, match=r"in\.csv\.gz: not a readable CSV file"):
        answer_file(load_policy("commbench"), tmp_path / "in.csv.gz", tmp_path / "out.csv")
    with pytest.raises(UsageError, match="cannot open"):
        answer_file(load_policy("commbench"), tmp_path / "gone.csv", tmp_path / "out.csv")
