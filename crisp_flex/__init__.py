"""Block-sparse prefill for any model, as a torch.compile backend: the public names.

model = crisp_flex.compile(model)                                  a module, compiled in place
torch.compile(model, backend="crisp_flex", options={...})          the same by name
crisp_flex.explain(model, input_ids)                               what it would do, and why not
crisp_flex.sparse_attention(q, k, v)                               without a model
"""

from crisp_flex.attention import route, sparse_attention
from crisp_flex.backend import CrispFlexBackend, Explanation, compile, explain, reports
from crisp_flex.config import CrispConfig
from crisp_flex.errors import ConfigError, CrispFlexError, InputError, UnavailableError
from crisp_flex.report import Reason, Rejection, RewriteReport, SiteReport

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "CrispConfig",
    "CrispFlexBackend",
    "CrispFlexError",
    "Explanation",
    "InputError",
    "Reason",
    "Rejection",
    "RewriteReport",
    "SiteReport",
    "UnavailableError",
    "compile",
    "explain",
    "reports",
    "route",
    "sparse_attention",
]
