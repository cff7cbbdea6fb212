"""The report as data, as text, and in torch's logs."""

import os
import subprocess
import sys

from crisp_flex import Reason, Rejection, RewriteReport, SiteReport

SHAPES = "q[1, 4, 256, 32] kv[1, 2, 256, 32] float32 cpu"


def test_a_report_gives_one_line_a_site():
    done = SiteReport(0, "attn", "layers.0", SHAPES, "causal", kernel="TRITON", policy="hybrid")
    left = SiteReport(1, "attn_1", "", SHAPES, "none", rejection=Rejection(Reason.DECODE))
    report = RewriteReport([done, left])
    assert (report.rewritten, report.rejected) == ([done], [left])
    assert str(report).splitlines() == [
        "1 of 2 attention calls rewritten",
        f"  layers.0: rewritten, hybrid on TRITON, causal, {SHAPES}",
        f"  attn_1: left dense: Lq is 1: a decode step, {SHAPES}",
    ]


def test_a_reason_is_a_sentence_and_no_two_are_alike():
    sentences = [reason.value for reason in Reason]
    assert len(set(sentences)) == len(sentences)
    assert all(len(sentence.split()) >= 3 and not sentence.endswith(".") for sentence in sentences)
    assert str(Rejection(Reason.TOO_SHORT, "Lq=64")) == (
        "less work than a prompt of min_seqlen tokens (Lq=64)"
    )


def test_torch_logs_shows_each_site_with_its_compile_id():
    code = (
        "import torch\n"
        "attend = torch.nn.functional.scaled_dot_product_attention\n"
        "q = torch.randn(1, 2, 64, 16)\n"
        "with torch.no_grad():\n"
        "    torch.compile(lambda q: attend(q, q, q, is_causal=True), backend='crisp_flex')(q)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_LOGS": "crisp_flex"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "[0/0] scaled_dot_product_attention: left dense: less work than" in run.stderr
