"""The lists of crisp_flex::route in Inductor's generated CUDA flex_attention kernel, on the CPU.

lower.py makes the programs as for an H200, run.py runs them in Triton's interpreter; each patches
torch and so is a process of its own. Only fp32: bf16 tl.dot is wrong in the interpreter (3.6).
"""

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the gpu tests run the kernel itself here", allow_module_level=True)

HERE = Path(__file__).parent
# fp32 against float64; the largest error measured is 2.5e-6
TOLERANCE = 1e-5

# at these lengths every block lies in a window that hybrid keeps
HYBRID = {"policy": "hybrid"}
STREAMING = {
    "policy": "streaming",
    "streaming_blocks": 1,
    "max_uncovered": 1.0,
    "dense_last_blocks": 0,
}
# from five visible blocks on, each head keeps its own
CRISP = {
    "policy": "crisp",
    "router": "pe",
    "gamma": 0.8,
    "max_uncovered": 1.0,
    "dense_last_blocks": 0,
}


def make_case(name, **changes):
    case = {
        "name": name,
        "B": 1,
        "Hq": 4,
        "Hkv": 2,
        "L": 300,
        "D": 64,
        # left padding of each sequence, in tokens
        "padding": None,
        # stored as [B, L, H, D], as transformers hands it over
        "transposed": False,
        "dynamic": False,
        "block_size": (128, 128),
        "kernel_options": {},
        "config": HYBRID,
        **changes,
    }
    return {"L_compiled": case["L"], **case}


# the default fp32 tiles (BLOCK_M, BLOCK_N) of an H200 are (128, 32) for D 64 and (32, 64) for D 128
CASES = {
    case["name"]: case
    for case in [
        make_case("even lengths", L=256),
        make_case("ragged, transposed", transposed=True),
        make_case(
            "ragged, small blocks",
            block_size=(64, 64),
            kernel_options={"BLOCK_M": 64, "BLOCK_N": 64},
            config=STREAMING,
        ),
        make_case("two partial slots", Hq=3, Hkv=1, block_size=(128, 64), config=STREAMING),
        make_case("padded", B=2, Hq=3, Hkv=1, padding=[70, 0]),
        make_case(
            "padded, small blocks, D 128",
            B=2,
            Hq=3,
            Hkv=1,
            D=128,
            padding=[70, 0],
            block_size=(64, 64),
            kernel_options={"BLOCK_M": 64},
            config=STREAMING,
        ),
        make_case(
            "padded, dynamic length",
            B=2,
            Hq=3,
            Hkv=1,
            L_compiled=450,
            padding=[70, 0],
            transposed=True,
            dynamic=True,
            block_size=(64, 64),
            kernel_options={"BLOCK_M": 64},
        ),
        make_case(
            "padded, heads differ",
            Hq=4,
            padding=[20],
            block_size=(32, 32),
            kernel_options={"BLOCK_M": 32, "BLOCK_N": 32},
            config=CRISP,
        ),
        # what the controls change: its partial list is as wide as there are blocks
        make_case("one sequence", Hq=2, Hkv=1, padding=[0]),
    ]
}
SPARSE = [name for name, case in CASES.items() if case["config"] is not HYBRID]
CONTROLS = ["drop a block", "one ascending list", "one descending list", "skip bounds checks"]
RUNS = [*((name, "nothing") for name in CASES), *(("one sequence", change) for change in CONTROLS)]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """outcome(case, change): the inputs, the lists as routed and the output of a run."""
    out = tmp_path_factory.mktemp("cuda_template")
    cases, runs = out / "cases.json", out / "runs.json"
    cases.write_text(json.dumps(list(CASES.values())))
    runs.write_text(json.dumps(RUNS))
    # lowered as on a machine with a GPU, also where the caller's environment sets it
    call_script("lower.py", cases, out, folder=out, TRITON_INTERPRET="0")
    call_script("run.py", cases, runs, out, folder=out, TRITON_INTERPRET="1")

    @functools.cache
    def load(case, change):
        return torch.load(out / f"{case}; {change}.pt")

    return load


def call_script(name, *args, folder, **environment):
    """Run a script of this folder with every cache and temporary file under folder."""
    root = HERE.parents[1]
    environment |= {
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests' / 'passes'}",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    done = subprocess.run(
        [sys.executable, HERE / name, *args],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode != 0:
        pytest.fail(f"{name} ended with {done.returncode}:\n{done.stderr[-4000:]}", pytrace=False)


def kept_blocks(case, lists):
    """[B, Hq, Nq, Nkv] bool: the union of both lists, which may not overlap."""
    counts, buffer, full_counts = lists
    Nkv = -(-case["L"] // case["block_size"][1])
    P = buffer.shape[3] - Nkv
    keep = torch.zeros(*counts.shape, Nkv, dtype=torch.int64)
    for at in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        row = buffer[tuple(at)].tolist()
        partial, full = int(counts[tuple(at)]), int(full_counts[tuple(at)])
        for block in row[:partial] + row[P : P + full]:
            keep[(*at, block)] += 1
    assert keep.max() == 1
    return keep.bool()


def visible_pairs(case):
    """[B, 1, L, L] bool: causal, and the key is no padding."""
    tokens = torch.arange(case["L"])
    starts = torch.tensor(case["padding"] or [0] * case["B"])
    return (tokens[:, None] >= tokens) & (tokens >= starts[:, None, None, None])


def masked_attention(case, inputs, lists):
    """The attention in float64, by the lists and the mask of each pair; 0 where all is masked."""
    q, k, v = (inputs[name].double() for name in ("q", "k", "v"))
    k, v = (x.repeat_interleave(case["Hq"] // case["Hkv"], 1) for x in (k, v))
    block_q, block_kv = case["block_size"]
    keep = kept_blocks(case, lists).repeat_interleave(block_q, 2).repeat_interleave(block_kv, 3)
    allowed = keep[:, :, : case["L"], : case["L"]] & visible_pairs(case)
    scores = (q @ k.transpose(2, 3) / math.sqrt(case["D"])).masked_fill(~allowed, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def error_by_row(case, run):
    """[B, Hq, L]: largest deviation of each row from the reference, over the largest value."""
    expected = masked_attention(case, run["inputs"], run["lists"])
    return (run["output"] - expected).abs().amax(-1) / expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_attends_to_what_the_lists_say(name, outcome):
    case = CASES[name]
    assert error_by_row(case, outcome(name, "nothing")).max() < TOLERANCE


@pytest.mark.parametrize("name", SPARSE)
def test_the_lists_leave_out_visible_blocks(name, outcome):
    case = CASES[name]
    run = outcome(name, "nothing")
    block_q, block_kv = case["block_size"]
    pairs = visible_pairs(case).float()
    visible = torch.nn.functional.max_pool2d(pairs, (block_q, block_kv), ceil_mode=True).bool()
    kept = kept_blocks(case, run["lists"])
    assert not (kept & ~visible).any()
    assert kept.sum() < visible.expand_as(kept).sum()
    if case["config"] is CRISP:
        assert (kept != kept[:, :1]).any()


def test_a_block_left_out_changes_its_rows_only(outcome):
    case = CASES["one sequence"]
    error = error_by_row(case, outcome("one sequence", "drop a block"))
    assert error[0, 0, 256:].max() > 100 * TOLERANCE
    error[0, 0, 256:] = 0
    assert error.max() < TOLERANCE


def test_full_blocks_may_stand_in_the_partial_list(outcome):
    case = CASES["one sequence"]
    assert error_by_row(case, outcome("one sequence", "one ascending list")).max() < TOLERANCE


def test_a_descending_list_loses_keys_before_a_ragged_tail(outcome):
    # the kernel stops after cdiv(L, BLOCK_N) tiles of a list, counting the tail block's as whole
    case = CASES["one sequence"]
    error = error_by_row(case, outcome("one sequence", "one descending list"))
    assert error[:, :, 256:].max() > 100 * TOLERANCE
    assert error[:, :, :256].max() < TOLERANCE


def test_a_read_past_the_end_meets_the_guard_pages(outcome):
    run = outcome("one sequence", "skip bounds checks")
    assert run["output"][0, 0, 256:].isnan().any()
