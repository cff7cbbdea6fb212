"""record: what each attention call kept while a block ran, with no sync inside the model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from crisp_flex import graph_run
from crisp_flex.backend import backend_of, models_of
from crisp_flex.errors import ConfigError, CrispFlexError, UnavailableError
from crisp_flex.record_audit import kept_mass, sample_rows
from crisp_flex.record_row import PartialCall, SiteRecord, site_record
from crisp_flex.report import SiteReport
from crisp_flex.routing.ops import RouteCall, watch
from crisp_flex.routing.params import STAT_NAMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The maps of longer calls are not kept unless heads are named: 512 x 512 blocks are 64k tokens.
_MOST_CELLS = 512 * 512
# Of a call's heads, those with the least, middle and most blocks.
_MASKS_SHOWN = 3
_VISIBLE = STAT_NAMES.index("visible_blocks")


@contextlib.contextmanager
def record(
    audit: int = 0,
    *,
    model: Callable[..., Any] | None = None,
    heads: tuple[int, ...] | None = None,
) -> Iterator[Record]:
    """Collect what each sparse attention call keeps, in all threads, while the block runs.

    Inside the model some small device tensors are copied on the device and kept; they are read when
    the block ends. Only route calls are seen: dense calls, decode steps, windows, chunks and
    documents make no rows, and what a CUDA graph replays (`mode="reduce-overhead"`) is not seen.

    Args:
        audit: Query blocks per call, at least 0, whose true attention mass kept is measured too:
            exact, on the device, at the cost of one dense row of blocks each.
        model: Only calls of this model (as `crisp_flex.compile` returned it); None is all.
        heads: Heads whose block maps are kept, whatever the length; None keeps those with the
            least, middle and most blocks of calls up to 64k tokens.

    Yields:
        The Record; its rows are there after the block.

    Raises:
        ConfigError: audit is no count, heads are no numbers, or model did not come from
            `crisp_flex.compile`.

    Example:
        >>> import torch, crisp_flex
        >>> q = torch.zeros(1, 2, 256, 16)
        >>> with crisp_flex.record(audit=1) as rec:
        ...     mask = crisp_flex.route(q, q, crisp_flex.CrispConfig(policy="dense"))
        >>> rec.rows[0].density, rec.rows[0].mass
        (1.0, [1.0, 1.0])
    """
    if isinstance(audit, torch.nn.Module):
        raise ConfigError("record: the first argument is audit; write record(model=model)")
    if isinstance(audit, bool) or not isinstance(audit, int) or audit < 0:
        raise ConfigError(f"audit must be a number of query blocks, 0 or more, got {audit!r}")
    if heads is not None and not (
        isinstance(heads, (tuple, list)) and all(isinstance(h, int) and h >= 0 for h in heads)
    ):
        raise ConfigError(f"heads must be numbers of heads such as (0, 5), got {heads!r}")
    only = None
    if model is not None:
        only = backend_of(model)
        if only is None:
            raise ConfigError(
                "record: this model did not come from crisp_flex.compile; leave model= out to "
                "record every call"
            )
    found = Record(audit=audit, only=only, heads=heads)
    try:
        with watch(found._note):
            yield found
    finally:
        found._read()
        found._open = False


@dataclasses.dataclass(slots=True)
class _Noted:
    """The route calls of one attention call, and where they ran."""

    site: SiteReport | None
    owner: object
    thread: str
    parts: list[PartialCall] = dataclasses.field(default_factory=list)


class Record:
    """The rows that `record` collected, and ways to look at them.

    Attributes:
        rows: One SiteRecord per attention call, in the order of the calls; empty inside the block.
        missed: Calls inside a CUDA graph's capture, which cannot be read.
    """

    def __init__(self, *, audit: int, only: object, heads: tuple[int, ...] | None) -> None:
        self.rows: list[SiteRecord] = []
        self.missed = 0
        self._audit, self._only, self._heads = audit, only, heads
        self._noted: dict[tuple[int, int], _Noted] = {}
        self._open = True
        self._calls = 0
        self._lock = threading.Lock()

    def _note(self, call: RouteCall) -> None:
        """Keep what a row needs, on the device (the watcher; runs in the model's thread)."""
        run = graph_run.current()
        if self._only is not None and (run is None or run.owner is not self._only):
            return
        if call.query.is_cuda and torch.cuda.is_current_stream_capturing():
            self.missed += 1
            return
        index = max(call.site, 0)
        site = run.sites[index] if run is not None and index < len(run.sites) else None
        Nq = call.result[0].shape[2]
        rows = Nq - (site.last_blocks_apart if site is not None else 0)
        with torch.no_grad():
            part = self._part(call, rows)
        with self._lock:
            self._calls += 1
            # the groups of one call have one key; a call without a graph has its own
            key = (run.number, index) if run is not None else (-1, self._calls)
            noted = _Noted(
                site, run.owner if run is not None else None, threading.current_thread().name
            )
            self._noted.setdefault(key, noted).parts.append(part)

    def _part(self, call: RouteCall, rows: int) -> PartialCall:
        counts, buffer, full_counts, stats = call.result
        Lq, Lkv = call.query.shape[2], call.key.shape[2]
        Nkv = -(-Lkv // call.params.block_kv)
        P = buffer.shape[-1] - Nkv
        part = PartialCall(
            # copies: the graph may use the op's outputs for something else once they are read
            counts=torch.stack((counts, full_counts)),
            stats=stats.clone(),
            Lq=Lq,
            Lkv=Lkv,
            slots=(P, Nkv),
            params=call.params,
            padded=call.key_valid is not None or call.q_offset is not None,
        )
        if self._audit and rows > 0:
            chosen = sample_rows(self._audit, rows, seed=call.site)
            part.masses = [(row, kept_mass(call, row)) for row in chosen]
        if counts.numel() and (self._heads is not None or counts.shape[2] * Nkv <= _MOST_CELLS):
            part.heads = self._chosen(part)
            if part.heads is not None:
                part.lists = (
                    part.counts[:, 0].index_select(1, part.heads),
                    buffer[0].index_select(0, part.heads),
                )
        return part

    def _chosen(self, part: PartialCall) -> torch.Tensor | None:
        """The heads whose lists are kept, as a tensor on the device."""
        Hq, device = part.counts.shape[2], part.counts.device
        if self._heads is not None:
            inside = [head for head in self._heads if 0 <= head < Hq]
            return torch.tensor(inside, device=device) if inside else None
        density = part.counts[:, 0].sum((0, -1)) / part.stats[0, :, _VISIBLE]
        order = density.argsort(stable=True)
        places = sorted({0, (Hq - 1) // 2, Hq - 1})[:_MASKS_SHOWN]
        return torch.stack([order[place] for place in places])

    def _read(self) -> None:
        """Make the rows of what was noted; waits for the device once."""
        with self._lock:
            noted, self._noted = self._noted, {}
        for device in {part.counts.device for it in noted.values() for part in it.parts}:
            if device.type == "cuda":  # also what other threads' streams still compute
                torch.cuda.synchronize(device)
        for (run, _), it in noted.items():
            site = it.site
            name = (site.module_path or site.node) if site is not None else f"call {len(self.rows)}"
            self.rows.append(
                site_record(
                    it.parts,
                    site,
                    run=run,
                    name=name,
                    model=models_of(it.owner),
                    thread=it.thread,
                )
            )

    @property
    def density(self) -> float:
        """Kept / visible blocks in [0, 1], the mean over the rows; 1 where nothing ran sparsely."""
        return sum(row.density for row in self.rows) / len(self.rows) if self.rows else 1.0

    @property
    def violations(self) -> int:
        """Heads above their max_uncovered, over all rows."""
        return sum(row.violations for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the totals, and the rows without their masks."""
        return {
            "calls": len(self.rows),
            "density": self.density,
            "violations": self.violations,
            "missed": self.missed,
            "rows": [row.to_dict() for row in self.rows],
        }

    def summary(self) -> str:
        """A table with a line a row: a rich table where rich is installed, else plain text."""
        from crisp_flex.record_table import summary

        return summary(self)

    __str__ = summary

    def __repr__(self) -> str:
        return (
            f"<Record of {len(self.rows)} attention calls, {self.density:.1%} of the blocks kept>"
        )

    def to_pandas(self) -> Any:  # noqa: ANN401
        """A pandas DataFrame with a line a row and the fields of SiteRecord, without the masks.

        Raises:
            UnavailableError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ModuleNotFoundError as error:
            raise UnavailableError(
                "to_pandas needs the package pandas: pip install pandas, or use to_dict()"
            ) from error
        return pandas.DataFrame([row.to_dict() for row in self.rows])

    def plot(self, run: int | None = None, *, title: str = "") -> Figure:
        """A matplotlib figure: density by layer and head, block maps of some heads, mass kept.

        Args:
            run: Number of the run to draw (`row.run`); None is the first.
            title: Headline; "" makes one.

        Raises:
            UnavailableError: matplotlib is not installed.
            CrispFlexError: Nothing was recorded.
        """
        try:
            from crisp_flex.record_plot import plot
        except ModuleNotFoundError as error:
            raise UnavailableError(
                "plot needs the package matplotlib: pip install 'crisp-flex[bench]'"
            ) from error
        return plot(self.of_run(run), title)

    def of_run(self, run: int | None = None) -> list[SiteRecord]:
        """The rows of one run, in the order of its calls.

        Args:
            run: Number of the run (`row.run`); None is the first.

        Raises:
            CrispFlexError: There are none.
        """
        numbers = sorted({row.run for row in self.rows})
        wanted = run if run is not None or not self.rows else self.rows[0].run
        rows = [row for row in self.rows if row.run == wanted]
        if not rows:
            raise CrispFlexError(
                f"there is no run {run}; recorded were {numbers}" if numbers else self.why_empty()
            )
        return rows

    def why_empty(self) -> str:
        """What to tell a user who asks for rows where there are none."""
        if self._open:
            return "the rows are read when the record block ends: ask for them behind it"
        return (
            "nothing was recorded: no call ran sparsely inside the block; "
            "crisp_flex.explain(model, ...) says why"
        )

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write everything as one HTML file that needs no network.

        Args:
            path: The file.

        Raises:
            CrispFlexError: Nothing was recorded.
            UnavailableError: matplotlib is not installed.
        """
        from crisp_flex.record_html import save_html

        save_html(self, path)
