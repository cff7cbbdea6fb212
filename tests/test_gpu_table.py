"""What each GPU gets: block sizes that FLASH takes, tiles that divide the blocks, evidence."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from crisp_flex import CrispConfig, flex_hop, gpu_table

HERE = Path(__file__).parent
CUDA = torch.device("cuda", 0)
ROWS = {f"sm_{major}{minor}": (major, minor) for major, minor in gpu_table.GPUS}


@pytest.fixture
def on(monkeypatch):
    """on(capability, flash): from now on such a GPU is there, with or without flash-attn-4."""

    def pretend(capability=(9, 0), flash=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(flex_hop, "flash_available", lambda: flash)

    return pretend


def settled(config=None, *, D=128, Dv=None, dtype=torch.bfloat16, captures=False):
    with FakeTensorMode():
        q = torch.empty(1, 8, 256, D, dtype=dtype, device=CUDA)
        v = torch.empty(1, 2, 256, Dv or D, dtype=dtype, device=CUDA)
    return flex_hop.settle(config or CrispConfig(), q, v, captures=captures)


@pytest.mark.parametrize(
    ("call", "block_size"),
    [
        ({"D": 128}, (128, 128)),
        ({"D": 64}, (128, 128)),
        ({"D": 256}, (128, 64)),
        ({"D": 192}, (128, 128)),  # its tile on Hopper is no power of two
        ({"D": 256, "Dv": 128}, (128, 128)),
        ({"D": 256, "dtype": torch.float32}, (128, 128)),
        ({"D": 256, "captures": True}, (128, 128)),
        ({"D": 256, "config": CrispConfig(backend="triton")}, (128, 128)),
        ({"D": 256, "config": CrispConfig(block_size=(128, 128))}, (128, 128)),
        ({"D": 128, "config": CrispConfig(block_size=(64, 64))}, (64, 64)),
    ],
)
def test_hopper_gets_the_blocks_that_flash_takes(on, call, block_size):
    on()
    assert settled(**call).block_size == block_size


def test_key_blocks_of_64_need_flash_and_hopper(on):
    on(flash=False)
    assert settled(D=256).block_size == (128, 128)
    for capability in ((8, 0), (10, 0), (12, 0), (7, 5)):
        on(capability)
        assert settled(D=256).block_size == (128, 128)


@pytest.mark.parametrize(
    ("D", "block_size", "kernel"),
    [
        (128, (128, 128), "FLASH"),
        (128, (128, 64), "FLASH"),
        (128, (64, 64), "TRITON"),
        (96, (128, 128), "FLASH"),
        (100, (128, 128), "TRITON"),
        (192, (128, 64), "TRITON"),
        (256, (128, 64), "FLASH"),
        (256, (128, 128), "TRITON"),
    ],
)
def test_the_kernel_follows_from_the_blocks(on, D, block_size, kernel):
    on()
    call = {"D": D, "Dv": D, "block_size": block_size, "backend": "auto"}
    chosen = flex_hop.choose_kernel(CUDA, torch.bfloat16, **call, captures=False)
    assert chosen == kernel
    assert flex_hop.choose_kernel(CUDA, torch.bfloat16, **call, captures=True) == "TRITON"
    on(flash=False)
    assert flex_hop.choose_kernel(CUDA, torch.bfloat16, **call, captures=False) == "TRITON"


@pytest.mark.parametrize("row", ROWS)
def test_min_seqlen_is_the_rows_unless_the_config_has_one(on, row, monkeypatch):
    gpu = dataclasses.replace(gpu_table.GPUS[ROWS[row]], min_seqlen=12345)
    monkeypatch.setattr(gpu_table, "GPUS", {ROWS[row]: gpu})
    on(ROWS[row])
    assert settled().min_seqlen == 12345
    assert settled(CrispConfig(min_seqlen=7)).min_seqlen == 7
    on((7, 5))
    assert settled().min_seqlen == 8192


def test_the_cpu_gets_the_defaults(qkv):
    q, _, v = qkv(Lq=64, D=256)
    config = flex_hop.settle(CrispConfig(), q, v, captures=False)
    assert (config.block_size, config.min_seqlen) == ((128, 128), 8192)


@pytest.mark.parametrize("row", [*ROWS, "sm_75"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("D", [16, 64, 80, 128, 192, 256])
def test_tiles_divide_the_blocks(on, row, dtype, D):
    on(ROWS.get(row, (7, 5)))
    for block_size in [(128, 128), (128, 64), (64, 64), (16, 128), (32, 16), (512, 256)]:
        options = gpu_table.triton_options(CUDA, dtype, D, block_size)
        if not options:  # Inductor's tiles are 128 at most
            assert min(block_size) >= 128
            continue
        assert block_size[0] % options["BLOCK_M"] == 0
        assert block_size[1] % options["BLOCK_N"] == 0
        assert min(options["BLOCK_M"], options["BLOCK_N"]) >= 16
        assert options["num_warps"] in (4, 8)
        assert "USE_TMA" not in options or D in (64, 128, 256)


def test_the_measured_options_reach_the_operator(on):
    on()
    settings = {"device": CUDA, "dtype": torch.bfloat16, "D": 128, "divisible": True}
    options = flex_hop.kernel_options("TRITON", **settings, user={"num_warps": 4})
    measured = {"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 2, "USE_TMA": True}
    assert options.items() >= {**measured, "num_warps": 4}.items()
    assert "BLOCK_M" not in flex_hop.kernel_options("FLASH", **settings, user={})


@pytest.mark.parametrize("row", ROWS)
def test_every_number_has_its_evidence(row):
    gpu = gpu_table.GPUS[ROWS[row]]
    assert gpu.cards
    assert gpu.min_seqlen >= 1
    assert gpu.min_seqlen_evidence
    assert bool(gpu.flash) == bool(gpu.flash_evidence)
    assert all(tuned.evidence for tuned in gpu.triton.values())


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "89", "120"])
def test_the_kernels_compile_and_fit_where_nothing_was_run(arch, tmp_path):
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, HERE / "cuda_template" / "offline.py", "--arch", arch],
        env={
            **os.environ,
            "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE / 'passes'}",
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(tmp_path / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [row["D"] for row in rows] == [64, 128, 256]
    for row in rows:
        assert row["shared_bytes"] <= row["limit_bytes"]
        assert row["spilled_bytes"] == 0
