"""Low-rank changes of the attention projections, and the file that holds them.

A projection becomes gain * (W + scale * up @ down): W frozen, up and down fp32 masters that are
rounded to bf16 wherever they are used, so that the bf16 file gives the very weights of training.
gain is one number a query head, on q alone: at longer lengths softmax has to be sharper, which low
rank cannot say. Its logarithm is the parameter. All of it merges into plain weights.
"""

import json
from dataclasses import dataclass

import torch
from torch import nn

NAMES = ("q", "k", "v", "o")
FORMAT = "crisp_flex long context 1"


@dataclass(frozen=True)
class Facts:
    """What an adapter's file says about itself.

    rope_theta: To run the model with.
    length: Tokens it was trained to.
    history: One dict a training run.
    """

    rope_theta: float
    length: int
    history: tuple = ()


class Adapter(nn.Module):
    """Low-rank pairs for every layer; new ones change nothing.

    Args:
        projections: The frozen (q, k, v, o) of each layer, [out, in].
        Hq: Query heads.
        rank: Of each change.
        scale: Factor of the change; twice what is usual to one, as alpha = 2 * rank elsewhere.
    """

    def __init__(self, projections, *, Hq, rank=32, scale=2.0, seed=0):
        super().__init__()
        self.Hq, self.rank, self.scale = Hq, rank, scale
        g = torch.Generator().manual_seed(seed)
        device = projections[0][0].device
        self.down, self.up = nn.ParameterList(), nn.ParameterList()
        for weights in projections:
            for W in weights:
                out, into = W.shape
                down = torch.randn(rank, into, generator=g) / into**0.5
                self.down.append(nn.Parameter(down.to(device)))
                self.up.append(nn.Parameter(torch.zeros(out, rank, device=device)))
        self.log_gain = nn.Parameter(torch.zeros(len(projections), Hq, device=device))

    def merged(self, projections):
        """The changed (q, k, v, o) of each layer, in the dtype of `projections`."""
        pairs = iter(zip(self.down, self.up, strict=True))
        layers = []
        for weights, log_gain in zip(projections, self.log_gain, strict=True):
            changed = []
            for name, W in zip(NAMES, weights, strict=True):
                down, up = next(pairs)
                new = W.float() + self.scale * (_rounded(up) @ _rounded(down))
                if name == "q":
                    new = new * log_gain.exp().repeat_interleave(W.shape[0] // self.Hq)[:, None]
                changed.append(new.to(W.dtype))
            layers.append(tuple(changed))
        return layers

    def save(self, path, facts):
        """Write a safetensors file; facts: Facts."""
        from safetensors.torch import save_file

        tensors = {"log_gain": self.log_gain.detach().float().cpu().contiguous()}
        for kind, parameters in (("down", self.down), ("up", self.up)):
            for index, x in enumerate(parameters):
                layer, name = divmod(index, len(NAMES))
                tensor = x.detach().to(torch.bfloat16).cpu().contiguous()
                tensors[f"layers.{layer}.{NAMES[name]}.{kind}"] = tensor
        metadata = {
            "format": FORMAT, "base": "SmolLM2-135M-Instruct", "licence": "Apache-2.0",
            "rope_theta": repr(float(facts.rope_theta)), "length": str(facts.length),
            "scale": repr(float(self.scale)), "history": json.dumps(facts.history),
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        # whole or not at all: the run may be cut while it writes
        unfinished = path.with_suffix(".part")
        save_file(tensors, unfinished, metadata=metadata)
        unfinished.replace(path)

    @classmethod
    def read(cls, path, projections):
        """(Adapter, Facts) of a file written by `save`.

        Raises:
            ValueError: The file is of another format or for another model.
        """
        from safetensors import safe_open

        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} is no adapter of this format ({FORMAT})")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        log_gain = tensors["log_gain"]
        rank = tensors["layers.0.q.down"].shape[0]
        if len(log_gain) != len(projections):
            raise ValueError(f"{path} has {len(log_gain)} layers, the model {len(projections)}")
        adapter = cls(
            projections, Hq=log_gain.shape[1], rank=rank, scale=float(metadata["scale"])
        )  # fmt: skip
        with torch.no_grad():
            adapter.log_gain.copy_(log_gain)
            for kind, parameters in (("down", adapter.down), ("up", adapter.up)):
                for index, x in enumerate(parameters):
                    layer, name = divmod(index, len(NAMES))
                    x.copy_(tensors[f"layers.{layer}.{NAMES[name]}.{kind}"])
        facts = Facts(
            rope_theta=float(metadata["rope_theta"]), length=int(metadata["length"]),
            history=tuple(json.loads(metadata["history"])),
        )  # fmt: skip
        return adapter, facts


def _rounded(x):
    """To bf16 and back; the gradient passes unrounded."""
    return x.to(torch.bfloat16).to(torch.float32)
