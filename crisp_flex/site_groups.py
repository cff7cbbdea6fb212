"""Groups of attention calls that differ in a number of their paths, for `Explanation` to print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from crisp_flex.report import SiteReport


def group_sites(
    sites: Sequence[SiteReport], line: Callable[[SiteReport], object]
) -> list[tuple[str, SiteReport]]:
    """The sites, joined where what is shown of them is the same but for a number in the path.

    Args:
        sites: In the order of the graphs.
        line: What is shown of a site; must be hashable.

    Returns:
        A pair (name, first site) a group, in the order of the first sites. The name is the path,
        with ranges of numbers and the count of sites where there are several.

    Example:
        >>> paths = ["layers.0.attn", "layers.1.attn", "layers.3.attn", "pool"]
        >>> sites = [SiteReport(0, "sdpa", path, "q[1, 2, 64, 16]", "causal") for path in paths]
        >>> [name for name, _ in group_sites(sites, str)]
        ['layers.0-1, 3.attn (3 sites)', 'pool']
    """
    groups: dict[object, list[SiteReport]] = {}
    places = _places([site.module_path for site in sites])
    for site in sites:
        parts = site.module_path.split(".")
        place = places[_shape(site.module_path)]
        if place is not None:
            parts[place] = "*"
        groups.setdefault(line(replace(site, module_path=".".join(parts))), []).append(site)
    return [
        (_name(group, places[_shape(group[0].module_path)]), group[0]) for group in groups.values()
    ]


def _shape(path: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def _places(paths: Sequence[str]) -> dict[str, int | None]:
    """By the shape of a path, which part of it has the most different numbers: the layer's."""
    values: dict[str, dict[int, set[str]]] = {}
    for path in paths:
        numbers = values.setdefault(_shape(path), {})
        for place, part in enumerate(path.split(".")):
            if part.isdecimal():
                numbers.setdefault(place, set()).add(part)
    return {
        shape: max(numbers, key=lambda place: len(numbers[place]), default=None)
        for shape, numbers in values.items()
    }


def _name(group: list[SiteReport], place: int | None) -> str:
    path = group[0].module_path or group[0].node
    if len(group) == 1:
        return path
    if place is not None:
        parts = path.split(".")
        parts[place] = _ranges(sorted({int(s.module_path.split(".")[place]) for s in group}))
        path = ".".join(parts)
    return f"{path} ({len(group)} sites)"


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as text: [0, 1, 2, 5] is "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
