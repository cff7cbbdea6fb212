"""The docs are true: their Python blocks run and print what they say, links resolve, nav is whole.

A block runs unless a comment in front of it says why not ("<!-- not run here: ... -->"). A text
block right behind it is its output; "..." there stands for anything. The blocks of a page share
their names. Graphs run as they are rewritten, without Inductor, which takes seconds a layer.
"""

import contextlib
import doctest
import io
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import torch

import crisp_flex
from crisp_flex import torch_internals

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
BLOCK = re.compile(
    r"(?P<not_run><!-- not run here[^>]*-->\n)?^```python\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
SNIPPET = "--8<--"


def blocks(page):
    """Line, code and expected output (or None) of the blocks of a page that run."""
    text = (DOCS / page).read_text()
    return [
        (text[: found.start("code")].count("\n"), found["code"], found["output"])
        for found in BLOCK.finditer(text)
        if not found["not_run"] and SNIPPET not in found["code"]
    ]


@pytest.fixture
def without_inductor(monkeypatch, tmp_path):
    monkeypatch.setattr(torch_internals, "compile_with_inductor", lambda gm, *_: gm.forward)
    monkeypatch.chdir(tmp_path)
    with torch.no_grad():
        yield


def printed(run):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run()
    return out.getvalue()


@pytest.mark.skipif(not torch_internals.cpu_has_flex(), reason="calls stay dense on this CPU")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_blocks_run_and_print_what_the_page_says(page, without_inductor):
    pytest.importorskip("transformers")
    names = {"__name__": page}
    # the models of a page share their code, and Dynamo counts what it compiles of one code object
    with torch._dynamo.config.patch(recompile_limit=64):
        for line, code, output in blocks(page):
            source = compile("\n" * line + code, DOCS / page, "exec")
            got = printed(lambda source=source: exec(source, names))
            if output is not None:
                same = doctest.OutputChecker().check_output(output, got, doctest.ELLIPSIS)
                assert same, f"{page}:{line} prints\n{got}\nand the page says\n{output}"


def test_the_first_example_runs(without_inductor):
    pytest.importorskip("transformers")
    said = printed(lambda: runpy.run_path(str(DOCS / "examples" / "first_steps.py")))
    assert "1 of 1 attention calls rewritten" in said


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_links_resolve(page):
    text = (DOCS / page).read_text()
    for target in LINK.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (DOCS / page).parent / name if name else DOCS / page
        assert file.exists(), f"{page} links to {target}"
        if anchor and file.name != "api.md":
            headings = re.findall(r"^#+ +(.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{page} links to {target}"


def slug(heading):
    """The anchor that MkDocs gives a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def test_every_page_is_in_the_navigation():
    # mkdocs.yml is read as text, since a YAML parser is in no extra of the tests
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == PAGES


def test_every_snippet_and_example_exists():
    text = "".join((DOCS / page).read_text() for page in PAGES)
    shown = set(re.findall(rf"{SNIPPET}\n(\S+)\n{SNIPPET}", text))
    assert shown == {f"docs/examples/{path.name}" for path in (DOCS / "examples").glob("*.py")}


def test_every_public_name_is_in_the_reference():
    text = (DOCS / "api.md").read_text()
    errors = {name for name in vars(crisp_flex.errors) if name.endswith(("Error", "Warning"))}
    assert "::: crisp_flex.errors" in text
    missing = set(crisp_flex.__all__) - errors - set(re.findall(r"::: crisp_flex\.(\w+)", text))
    assert not missing


def test_the_docs_extra_has_what_the_site_is_built_with():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names = " ".join(extras["docs"])
    assert "mkdocs-material" in names
    assert "mkdocstrings[python]" in names
