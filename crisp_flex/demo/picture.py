"""The demo's picture: the blocks that heads kept and how many each layer kept, from the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from crisp_flex.routing.params import STAT_NAMES

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

# The heads of a layer that are kept for the picture: those with the least, middle and most blocks.
HEADS_SHOWN = 3
LAYERS_SHOWN = 4


def kept_blocks(
    kv_num_blocks: Tensor, kv_indices: Tensor, full_kv_num_blocks: Tensor, Nkv: int
) -> Tensor:
    """The block lists of a route call as a bool map.

    Args:
        kv_num_blocks: (..., Nq) int32, lengths of the partial lists.
        kv_indices: (..., Nq, P + Nkv) int32, the partial list in the first P slots, the full list
            behind them; what is beyond a list's length is undefined.
        full_kv_num_blocks: (..., Nq) int32, lengths of the full lists.
        Nkv: Number of key blocks.

    Returns:
        (..., Nq, Nkv) bool, True where the block is in one of the lists.
    """
    P = kv_indices.shape[-1] - Nkv
    # One column more than there are blocks: what is beyond a list's length goes there.
    kept = torch.zeros(*kv_indices.shape[:-1], Nkv + 1, dtype=torch.bool, device=kv_indices.device)
    for count, blocks in (
        (kv_num_blocks, kv_indices[..., :P]),
        (full_kv_num_blocks, kv_indices[..., P:]),
    ):
        listed = torch.arange(blocks.shape[-1], device=blocks.device) < count[..., None]
        kept.scatter_(-1, blocks.long().where(listed, Nkv), True)
    return kept[..., :Nkv]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBlocks:
    """What one attention layer kept.

    Args:
        density: (Hq,) float64, kept / visible blocks of each head, in [0, 1].
        heads: The heads of `masks`, from the least to the most blocks.
        masks: (len(heads), Nq, Nkv) bool, the blocks kept.
    """

    density: Tensor
    heads: list[int]
    masks: Tensor


@dataclass(slots=True)
class BlockRecorder:
    """Callback of `routing.ops.observe` that notes what each route call of a prompt step kept.

    Args:
        Nkv: Number of key blocks.
        layers: One entry per call, in the order of the calls, which is that of the layers.
    """

    Nkv: int
    layers: list[LayerBlocks] = field(default_factory=list)
    _visible: list[float] = field(default_factory=list)
    _kept: list[float] = field(default_factory=list)

    def __call__(
        self,
        call_index: int,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor,
        stats: Tensor,
    ) -> None:
        """Note a call; of the batch, its first sequence."""
        kept = (kv_num_blocks[0] + full_kv_num_blocks[0]).sum(-1).double().cpu()
        visible = stats[0, :, STAT_NAMES.index("visible_blocks")].double().cpu()
        density = kept / visible
        order = density.argsort(stable=True).tolist()
        places = {0, (len(order) - 1) // 2, len(order) - 1}
        heads = [order[place] for place in sorted(places)][:HEADS_SHOWN]
        masks = kept_blocks(
            kv_num_blocks[0, heads].cpu(),
            kv_indices[0, heads].cpu(),
            full_kv_num_blocks[0, heads].cpu(),
            self.Nkv,
        )
        self.layers.append(LayerBlocks(density=density, heads=heads, masks=masks))
        self._kept.append(float(kept.sum()))
        self._visible.append(float(visible.sum()))

    @property
    def density(self) -> float:
        """Kept / visible blocks over all calls and heads, in [0, 1]."""
        return sum(self._kept) / sum(self._visible)

    @property
    def density_by_layer(self) -> list[float]:
        """Kept / visible blocks of each call, in [0, 1]."""
        return [kept / visible for kept, visible in zip(self._kept, self._visible, strict=True)]


def save_picture(recorder: BlockRecorder, title: str, file: Path) -> None:
    """Draw the kept blocks of some heads of some layers, and the density of every layer, as a PNG.

    Args:
        recorder: What a prompt step kept, at least one layer.
        title: Headline of the picture.
        file: Where the PNG goes; its folder exists.
    """
    from matplotlib.figure import Figure

    layers = recorder.layers
    shown = sorted({round(i * (len(layers) - 1) / (LAYERS_SHOWN - 1)) for i in range(LAYERS_SHOWN)})
    rows = max(len(layers[index].heads) for index in shown)
    figure = Figure(figsize=(2.9 * max(len(shown), 3), 3.0 * rows + 2.6), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(rows + 1, len(shown), height_ratios=[3.0] * rows + [2.2])
    for column, index in enumerate(shown):
        layer = layers[index]
        for row, (head, mask) in enumerate(zip(layer.heads, layer.masks, strict=True)):
            axes = figure.add_subplot(grid[row, column])
            _draw_blocks(axes, mask)
            density = float(layer.density[head])
            axes.set_title(f"layer {index}, head {head}: {density:.1%} kept", fontsize=9)
            if row == len(layer.heads) - 1:
                axes.set_xlabel("key block", fontsize=8)
            if column == 0:
                axes.set_ylabel("query block", fontsize=8)
    _draw_density(figure.add_subplot(grid[rows, :]), recorder)
    figure.savefig(file, dpi=120)


def _draw_blocks(axes: Axes, mask: Tensor) -> None:
    """Kept blocks dark, dropped ones pale, those in the future white."""
    from matplotlib.colors import ListedColormap

    Nq, Nkv = mask.shape
    visible = torch.ones(Nq, Nkv).tril(Nkv - Nq)
    colours = ListedColormap(["white", "#dbe4ee", "#1b4f8a"])
    axes.imshow((visible + mask).numpy(), cmap=colours, vmin=0, vmax=2, interpolation="nearest")
    axes.tick_params(labelsize=7)


def _draw_density(axes: Axes, recorder: BlockRecorder) -> None:
    """A bar per layer, with a line from its sparsest to its densest head."""
    mean = recorder.density_by_layer
    low = [mean[i] - min(mean[i], float(x.density.min())) for i, x in enumerate(recorder.layers)]
    high = [max(mean[i], float(x.density.max())) - mean[i] for i, x in enumerate(recorder.layers)]
    axes.bar(range(len(mean)), mean, color="#1b4f8a", yerr=[low, high], ecolor="#8a9aac")
    axes.axhline(recorder.density, color="#c2410c", linewidth=1)
    axes.set_title(f"blocks kept by layer (line: all layers, {recorder.density:.1%})", fontsize=9)
    axes.set_ylim(0, 1)
    axes.margins(x=0.01)
    axes.set_xlabel("layer", fontsize=8)
    axes.set_ylabel("kept / visible", fontsize=8)
    axes.tick_params(labelsize=7)
