"""Ask the real SGLang 0.5.3 for its decisions after an exported module changed its tables. Run by
test_export_sglang.py: exported module, a JSON file of (capability major, ranks, dtype, size); prints picks as JSON."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from sglang_driver import coordinator, decide, load, tensor


def main(module: str, questions: str) -> None:
    parallel_state = load("cuda")
    runpy.run_path(module)["apply"]()
    picks = []
    made = {}
    for major, ranks, dtype, size in json.loads(Path(questions).read_text()):
        facts = {
            "arch": "cuda",
            "cc_major": major,
            "cc_minor": 0,
            "world_size": ranks,
            "nnodes": 1,
            "nvlink": 1,
            "multicast": 1,
            "requested": "ca_v1+symm_mem",
        }
        if (major, ranks) not in made:
            made[major, ranks] = coordinator(parallel_state, facts)
        itemsize = 4 if dtype == "float32" else 2
        picks.append(decide(parallel_state, made[major, ranks], "eager", tensor(dtype, size // itemsize, "contig")))
    json.dump(picks, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
