"""Every module imports by one name, the link is in place, the contract pulls in no kernels."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import crisp_flex

ROOT = Path(__file__).parents[1]


def modules():
    return [m.name for m in pkgutil.walk_packages(crisp_flex.__path__, "crisp_flex.")]


@pytest.mark.parametrize("name", modules())
def test_every_module_imports_and_says_what_it_is(name):
    assert importlib.import_module(name).__doc__


def test_the_passes_are_real_files_at_the_top_and_have_one_name():
    assert (ROOT / "crisp_flex" / "passes").is_symlink()
    assert "crisp_flex.passes.pipeline" in modules()
    run = subprocess.run(
        [sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True
    )
    assert "import crisp_flex.passes, not 'passes'" in run.stderr


def test_the_import_leaves_torch_as_it_was_and_loads_no_reference():
    code = (
        "import sys, torch, torch.nn.functional as F; before = F.scaled_dot_product_attention\n"
        "import crisp_flex\n"
        "assert F.scaled_dot_product_attention is before\n"
        "lazy = {'crisp_flex.routing.reference', 'transformers'}\n"
        "assert not lazy & set(sys.modules), lazy & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_backend_is_found_by_its_entry_point():
    code = "import torch._dynamo as d; assert 'crisp_flex' in d.list_backends(None)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
