"""What routes a head in policy "crisp", measured on whole prompts: c_struct, and the JSD beside it.

FlexPrefill trusts the pooled estimate of a head if the root of the Jensen-Shannon divergence
between it and the exact mass of the proxy rows stays below .1; CRISP replaces that test by
c_struct. A head agrees if both tests send it the same way.
"""

from dataclasses import dataclass, field

import torch

from crisp_flex import CrispConfig
from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.params import RouteParams
from crisp_flex.routing.policies.crisp import JSD_THRESHOLD, proxy_root_jsd
from crisp_flex.routing.pool import pool
from crisp_flex.routing.probe import probe

TAU = CrispConfig().tau


@dataclass
class Routing:
    """c_struct and root JSD of the layers of one prompt step; one entry [H] a layer."""

    layers: list = field(default_factory=list)
    c_struct: list = field(default_factory=list)
    root_jsd: list = field(default_factory=list)

    def add(self, layer, query, key, scale):
        """Note one layer; query [1, Hq, L, D], key [1, Hkv, L, D], after RoPE."""
        config = CrispConfig(policy="crisp", block_size=(128, 128))
        params = RouteParams.from_config(config, D=query.shape[-1], scale=scale)
        geometry = Geometry.of(query, key, None, params)
        measured = probe(query, key, geometry, scale=scale, audit_rows=0)
        _, mean_key = pool(query, key, geometry)
        self.layers.append(layer)
        self.c_struct.append(measured.c_struct[0])
        self.root_jsd.append(proxy_root_jsd(measured, mean_key, geometry, scale)[0])

    def row(self):
        """The maps [layers][heads], and the shares of heads on which the tests agree."""
        c_struct, root_jsd = (torch.stack(x).cpu() for x in (self.c_struct, self.root_jsd))
        lines = root_jsd >= JSD_THRESHOLD
        return {
            "layers": self.layers, "tau": TAU, "jsd_threshold": JSD_THRESHOLD,
            "c_struct": c_struct.tolist(), "root_jsd": root_jsd.tolist(),
            "agreement": float(((c_struct >= TAU) == lines).double().mean()),
            # what a router that sends every head to its lines would reach
            "agreement_of_lines_only": float(lines.double().mean()),
        }  # fmt: skip
