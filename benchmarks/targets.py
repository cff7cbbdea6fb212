"""Issue 3's targets, as statements about rows of bench_attention.py: what was asked, what came out.

Pure Python, so that rows can be judged anywhere.
"""

# (length from, length to, density to, ratio to the fastest dense SDPA at least)
RATIOS = ((32768, 32768, 0.135, 4.0), (131072, 131072, 0.135, 8.0), (524288, 524288, 0.035, 25.0))
# Total over density x the fastest dense SDPA, on captured inputs of at least 16k tokens.
CAPTURED_FACTOR, CAPTURED_TOKENS = 1.3, 16384
# Share of the dense TFLOP/s that the sparse kernel reaches: {kernel: (dense paths, share)}.
KERNEL_SHARES = {"FLASH": (("fa4", "flex_fa4"), 0.90), "TRITON": (("flex_triton",), 0.95)}
KERNEL_TOKENS = 131072
MEMORY_FACTOR, INDEX_SHARE = 1.10, 0.10
BREAK_EVEN_TOKENS = 8192


def fastest(row, prefixes=("sdpa", "flex", "fa4")):
    """(path, milliseconds) of the row's fastest dense path with one of the prefixes, or None."""
    skip = ("_launched", "_peak")
    times = [
        (name.removesuffix("_ms"), value)
        for name, value in row.items()
        if name.endswith("_ms") and name.startswith(prefixes) and value
        if not any(part in name for part in skip)
    ]
    return min(times, key=lambda path: path[1], default=None)


def total_of(row):
    """Milliseconds of selection and attention; older rows have the parts alone."""
    return row["total_ms"] if "total_ms" in row else row["route_ms"] + row["sparse_ms"]


def verdicts(rows):
    """Lines "met" or "MISSED", one per target that one of the rows can be held against."""
    lines = []
    for row in rows:
        what = f"{row.get('model') or row['heads']} {row['length'] // 1024}k {row['kernel']}"
        if "layer" in row:
            what += f" layer {row['layer']}"
        total, sdpa = total_of(row), fastest(row, ("sdpa",))
        captured = row.get("inputs") == "captured"
        density = f"{row['density']:.1%}"
        if sdpa:
            ratio = sdpa[1] / total
            said = f"{sdpa[1]:.3f} / {total:.3f} ms = {ratio:.2f}x at {density}"
            if captured and row["length"] >= CAPTURED_TOKENS:
                most = CAPTURED_FACTOR * row["density"] * sdpa[1]
                lines.append(_line(total <= most, what, f"total {total:.3f} <= {most:.3f} ms "
                                   f"({CAPTURED_FACTOR} x {density} x {sdpa[1]:.3f})"))  # fmt: skip
            if captured and row["length"] == BREAK_EVEN_TOKENS:
                lines.append(_line(ratio >= 1, what, f"never slower than dense: {said}"))
            for first, last, most_density, least in () if captured else RATIOS:
                if first <= row["length"] <= last and row["density"] <= most_density:
                    lines.append(_line(ratio >= least, what, f"{said}, target {least:g}x"))
        lines += _kernel_share(row, what) + _memory(row, what)
    return lines


def _kernel_share(row, what):
    """The sparse kernel's TFLOP/s on kept blocks against the same kernel's dense call."""
    paths, share = KERNEL_SHARES.get(row["kernel"], ((), 0.0))
    dense = fastest(row, paths) if paths else None
    if row["length"] != KERNEL_TOKENS or dense is None:
        return []
    # dense_tflops is that of the fastest dense path; all of them do the same work
    got = row["sparse_tflops"] / (row["dense_tflops"] * fastest(row)[1] / dense[1])
    said = f"sparse kernel at {got:.1%} of {dense[0]} ({dense[1]:.2f} ms), target {share:.0%}"
    return [_line(got >= share, what, said)]


def _memory(row, what):
    """Memory against dense SDPA's, and the block lists' against K and V's."""
    if not row.get("sdpa_peak_mib") or row["length"] < KERNEL_TOKENS:
        return []
    base, kv = row["inputs_mib"], row["kv_mib"]
    sparse, dense = (base + row[f"{path}_peak_mib"] for path in ("sparse", "sdpa"))
    share = row["index_mib"] / kv
    allowed = MEMORY_FACTOR * dense + row["index_mib"]
    return [
        _line(sparse <= allowed, what, f"{sparse:.0f} MiB against dense {dense:.0f} MiB"),
        _line(share <= INDEX_SHARE, what,
              f"block lists {share:.1%} of K and V, target {INDEX_SHARE:.0%}"),
    ]  # fmt: skip


def break_even(rows):
    """Lines about rows of --break-even: per heads and inputs, from which length on sparse wins."""
    cases = {}
    for row in rows:
        key = (row["heads"], row["inputs"], row.get("model", ""), row["backend"])
        cases.setdefault(key, []).append(row)
    lines = []
    for (heads, inputs, model, backend), group in cases.items():
        for suffix, how in (("_ms", "as a CUDA graph"), ("_launched_ms", "as called")):
            tokens = shortest_win(group, suffix)
            met = tokens is not None and tokens <= BREAK_EVEN_TOKENS
            found = f"sparse wins from {tokens} tokens on" if tokens else "sparse never wins"
            lines.append(_line(met, f"{heads} {model or inputs} {backend}", f"{found} {how}"))
    return lines


def shortest_win(rows, suffix="_ms"):
    """The least length from which on the total is below the fastest SDPA, or None."""
    shortest = None
    for row in sorted(rows, key=lambda row: -row["length"]):
        dense = [
            value for name, value in row.items()
            if name.startswith("sdpa") and name.endswith(suffix) and value
            if ("_launched" in name) == ("_launched" in suffix)
        ]  # fmt: skip
        if not dense or row[f"total{suffix}"] >= min(dense):
            return shortest
        shortest = row["length"]
    return shortest


def _line(met, what, said):
    return f"{'met   ' if met else 'MISSED'} {what}: {said}"
