"""Explanation: what `explain` found, as data, as text and as HTML for notebooks."""

from __future__ import annotations

import html
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from crisp_flex.advice import ADVICE, backend_ignored
from crisp_flex.config import CrispConfig
from crisp_flex.html_page import table, write_page
from crisp_flex.report import RewriteReport, SiteReport
from crisp_flex.site_groups import group_sites

# A graph break's text can be pages long.
_REASON_CHARACTERS = 200


@dataclass(slots=True, eq=False)
class Explanation:
    """What crisp_flex does to a model's call.

    Args:
        graphs: One report a graph, in the order of their compilation.
        model: The model's class, or the function's name.
        config: What was asked for.
        breaks: The reasons of Dynamo's graph breaks, one entry a break.
        parts: Parts of the model that are compiled one by one (below accelerate's hooks), so that
            several graphs are expected; 0 for a model compiled as a whole.
    """

    graphs: list[RewriteReport]
    model: str = ""
    config: CrispConfig = field(default_factory=CrispConfig)
    breaks: list[str] = field(default_factory=list)
    parts: int = 0

    @property
    def report(self) -> RewriteReport:
        """All sites of all graphs."""
        return RewriteReport([site for graph in self.graphs for site in graph.sites])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `crisp-flex explain --json` prints it."""
        report = self.report
        return {
            "model": self.model,
            "graphs": len(self.graphs),
            "graph_breaks": self.breaks,
            "sites": len(report.sites),
            "rewritten": len(report.rewritten),
            "calls": [_site_dict(site) for site in report.sites],
        }

    def __str__(self) -> str:
        report = self.report
        lines = [
            f"{_count(len(self.graphs), 'graph')}; {len(report.rewritten)} of {len(report.sites)} "
            "attention calls rewritten"
        ]
        for name, site in group_sites(report.sites, describe_site):
            lines.append(f"  {describe_site(replace(site, module_path=name))}")
        lines += [f"  {note}" for note in self._notes()]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """A table with a row for each group of alike sites, for notebooks."""
        return f"<p>{html.escape(self._headline())}</p>{self._table()}"

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the table and the notes as one HTML file that needs no network.

        Args:
            path: The file; one that is there is replaced.

        Raises:
            CrispFlexError: The file cannot be written.
        """
        write_page(path, self._headline(), self._table())

    def _headline(self) -> str:
        report = self.report
        return (
            f"{self.model}: {len(report.rewritten)} of {len(report.sites)} attention calls "
            f"rewritten, {_count(len(self.graphs), 'graph')}"
        )

    def _table(self) -> str:
        heads = ("call", "outcome", "mask", "shapes", "kernel", "blocks chosen by", "what to do")
        groups = group_sites(self.report.sites, _cells)
        rows = [_cells(replace(site, module_path=name)) for name, site in groups]
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self._notes())
        return f"{table(heads, rows, whole=('kernel',))}<ul>{notes}</ul>"

    def _notes(self) -> list[str]:
        """What is true of the whole call."""
        sites = self.report.sites
        notes = []
        for length in sorted({site.min_seqlen for site in sites if site.min_seqlen}):
            notes.append(
                f"break-even: sparse from about {length} query tokens on "
                f"({'your min_seqlen' if self.config.min_seqlen else _measured(sites)})"
            )
        if any(site.selection == "reference" and "cuda" in site.shapes for site in sites):
            notes.append(
                "selection runs as plain PyTorch on the GPU for some calls, which costs more than "
                "it saves: use bfloat16 or float16, blocks of 64 or 128 and a policy with kernels "
                "(hybrid, crisp, streaming); D above 128 needs 160 KB of shared memory"
            )
        if any(site.kernel == "CPU" for site in sites):
            notes.append("the CPU is for trying things out: right, not fast")
            if self.config.backend != "auto":
                notes.append(backend_ignored(self.config.backend))
        notes += [
            f"graph break: {' '.join(reason.split())[:_REASON_CHARACTERS]}"
            for reason in dict.fromkeys(self.breaks)
        ]
        if self.parts:
            notes.append(f"{self.parts} parts of the model are compiled one by one (device_map)")
        if not sites:
            notes.append(
                "no scaled_dot_product_attention call was found: load the model with "
                'attn_implementation="sdpa"; torch.nn.MultiheadAttention and what is built on it '
                "are one call to Dynamo, which is not looked into"
            )
        return notes


def describe_site(site: SiteReport) -> str:
    """One line about a site: where, what became of it, and what to do about a refusal.

    Example:
        >>> from crisp_flex import Reason, Rejection
        >>> print(describe_site(SiteReport(0, "sdpa", "layers.0", "q[1, 2, 64, 16]", "causal",
        ...     rejection=Rejection(Reason.NEEDS_GRAD))))
        layers.0: left dense: gradients are needed; the sparse path is for inference (call under \
torch.no_grad()), q[1, 2, 64, 16]; mask: causal; do: call it under torch.no_grad()
    """
    text = str(site)
    if site.rewritten:
        chosen = {
            "kernels": "blocks chosen by Triton kernels",
            "reference": "blocks chosen by plain PyTorch",
        }.get(site.selection, "every block of the window kept")
        return f"{text}; {chosen}"
    advice = _advice(site)
    return f"{text}; mask: {site.mask}" + (f"; do: {advice}" if advice else "")


def _advice(site: SiteReport) -> str:
    return "" if site.rejection is None else ADVICE.get(site.rejection.reason.name, "")


def _site_dict(site: SiteReport) -> dict[str, Any]:
    data = asdict(site)
    rejection = data.pop("rejection")
    data["rewritten"] = site.rewritten
    data["reason"] = None if rejection is None else rejection["reason"].name
    data["detail"] = "" if site.rejection is None else str(site.rejection)
    data["advice"] = _advice(site)
    return data


def _cells(site: SiteReport) -> tuple[str, ...]:
    chosen = {"kernels": "Triton kernels", "reference": "plain PyTorch", "": "no choice: all kept"}
    return (
        site.module_path or site.node,
        f"sparse: {site.policy}" if site.rewritten else f"dense: {site.rejection}",
        site.mask,
        site.shapes,
        site.kernel or "SDPA",
        chosen.get(site.selection, site.selection) if site.rewritten else "",
        _advice(site),
    )


def _measured(sites: list[SiteReport]) -> str:
    on_gpu = any("cuda" in site.shapes for site in sites)
    return "from the table of GPUs" if on_gpu else "the default; not measured on a CPU"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"
