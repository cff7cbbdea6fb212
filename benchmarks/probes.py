"""Run the failure cases of a cases.md as they stand there: a table of pass, fail and skip.

    python benchmarks/probes.py CASES.md [--len 32768] [--device cuda] [--only B06,B17] [--jobs 2]

A case is a section "## B01 title" with one python block, which passes if it ends without an
exception. Each runs in a process of its own with the folder of CASES.md on its path (qa_common.py
lies there), so a crash, a hang or a global left behind stays with its case. A case that wants a
package that is not installed is skipped. Cases that measure time (--alone) run after the others,
one at a time. Exit status: the number of failures.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from timing import where, write_rows

CASE = re.compile(r"^## (B\d+) ([^\n]*)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MISSING = re.compile(r"No module named '(accelerate|peft|torchao|transformers)'")
# Before the probe: at its default min_seqlen a trial with a short --len would be dense throughout.
SHORTEST = (
    "from crisp_flex import gpu_table as _t\n"
    "for _gpu in (_t._UNKNOWN, *_t.GPUS.values()): "
    'object.__setattr__(_gpu, "min_seqlen", {min_seqlen})\n'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One probe: its name, its title and its code."""

    name: str
    title: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case: "pass", "fail" or "skip", seconds, what it printed, the last error."""

    case: Case
    status: str
    seconds: float
    output: str
    error: str


def read_cases(path):
    """The cases of a markdown file, in its order; a section without code is no case."""
    found = []
    for name, title, body in CASE.findall(Path(path).read_text()):
        if block := CODE.search(body):
            found.append(Case(name=name, title=title.strip(), code=block[1]))
    return found


def run_case(case, folder, *, length, device, min_seqlen, timeout):
    """Run one case in a process of its own."""
    prologue = SHORTEST.format(min_seqlen=min_seqlen) if min_seqlen else ""
    env = {**os.environ, "QA_LEN": str(length), "QA_DEV": device}
    paths = [str(Path(folder).resolve()), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / f"{case.name}.py"
        script.write_text(prologue + case.code)
        try:
            done = subprocess.run(
                [sys.executable, str(script)], env=env, cwd=scratch, timeout=timeout,
                capture_output=True, text=True, errors="replace",
            )  # fmt: skip
            status, output, noise = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            status, output = None, _text(late.stdout)
            noise = f"{_text(late.stderr)}\nno end within {timeout} s"
    seconds = time.perf_counter() - start
    if status == 0:
        return Outcome(case=case, status="pass", seconds=seconds, output=output, error="")
    error = _error(noise, case, prologue) or f"exit status {status}"
    verdict = "skip" if MISSING.search(error) else "fail"
    return Outcome(case=case, status=verdict, seconds=seconds, output=output + noise, error=error)


def _text(data):
    return data.decode(errors="replace") if isinstance(data, bytes) else data or ""


def _error(noise, case, prologue):
    """The exception of a traceback, with the line of the probe that it went through."""
    lines = [line for line in noise.splitlines() if line.strip()]
    errors = [x for x in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", x)]
    error = errors[-1] if errors else lines[-1] if lines else ""
    at = re.findall(rf'{case.name}\.py", line (\d+)', noise)
    if not at:
        return error
    code = (prologue + case.code).splitlines()
    return f"{error}  [{code[int(at[-1]) - 1].strip()}]"


def table(outcomes):
    """Markdown rows, one a case."""
    rows = ["| case | result | s | what it printed last, or the error |", "|---|---|---|---|"]
    for x in outcomes:
        said = x.error or (x.output.strip().splitlines() or [""])[-1]
        said = said.replace("|", "\\|")[:200]
        rows.append(f"| {x.case.name} | {x.status} | {x.seconds:.0f} | {said} |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", help="cases.md; qa_common.py lies beside it")
    parser.add_argument("--len", type=int, default=32768, dest="length", help="QA_LEN")
    parser.add_argument("--device", default=None, help="QA_DEV; default cuda if there is one")
    parser.add_argument("--only", default="", help="names by comma; default all")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time on the one device")
    parser.add_argument("--alone", default="B02,B06,B08,B16,B20", help="measure: one at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a case")
    parser.add_argument(
        "--min-seqlen", type=int, default=None,
        help="lower the library's default of min_seqlen, for trials with a short --len",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="print all that failed cases said")
    parser.add_argument("--out", default=None, help="append JSON rows to this file")
    args = parser.parse_args()
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    only = set(filter(None, args.only.split(",")))
    cases = [x for x in read_cases(args.cases) if not only or x.name in only]
    unknown = only - {x.name for x in cases}
    if unknown:
        parser.error(f"{args.cases} has no case {', '.join(sorted(unknown))}")
    alone = set(args.alone.split(","))

    def run(case):
        outcome = run_case(
            case, Path(args.cases).parent, length=args.length, device=device,
            min_seqlen=args.min_seqlen, timeout=args.timeout,
        )  # fmt: skip
        print(f"{case.name} {outcome.status} {outcome.seconds:.0f} s {outcome.error}", flush=True)
        if args.verbose and outcome.status == "fail":
            print(outcome.output, flush=True)
        return outcome

    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = list(pool.map(run, [x for x in cases if x.name not in alone]))
    outcomes += [run(x) for x in cases if x.name in alone]
    outcomes.sort(key=lambda x: x.case.name)
    print(table(outcomes))
    if args.out:
        base = {**where(), "length": args.length, "min_seqlen": args.min_seqlen}
        write_rows(
            [
                {**base, "case": x.case.name, "result": x.status,
                 "seconds": round(x.seconds, 1), "error": x.error}
                for x in outcomes
            ],
            args.out,
        )  # fmt: skip
    sys.exit(sum(x.status == "fail" for x in outcomes))


if __name__ == "__main__":
    main()
