"""module_of(name): a module of benchmarks/, imported as its scripts import each other."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def module_of(monkeypatch):
    # tests have modules of the same names (inputs), which must be there again afterwards
    names = [path.stem for path in BENCHMARKS.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
