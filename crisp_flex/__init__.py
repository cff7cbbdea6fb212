"""Block-sparse prefill for any model, as a torch.compile backend: the public names.

model = crisp_flex.compile(model)                                  a module, compiled in place
torch.compile(model, backend="crisp_flex", options={...})          the same by name
crisp_flex.explain(model, input_ids)                               what it would do, and why not
with crisp_flex.record() as rec: ...                               what it kept, call by call
crisp_flex.sparse_attention(q, k, v)                               without a model
"""

from crisp_flex.attention import route, sparse_attention
from crisp_flex.backend import CrispFlexBackend, compile, reports
from crisp_flex.config import CrispConfig
from crisp_flex.errors import (
    ConfigError,
    CrispFlexError,
    FallbackWarning,
    InputError,
    UnavailableError,
    UncoveredError,
    UncoveredWarning,
)
from crisp_flex.explain import explain
from crisp_flex.explanation import Explanation
from crisp_flex.record import Record, record
from crisp_flex.record_row import SiteRecord
from crisp_flex.report import Reason, Rejection, RewriteReport, SiteReport

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "CrispConfig",
    "CrispFlexBackend",
    "CrispFlexError",
    "Explanation",
    "FallbackWarning",
    "InputError",
    "Reason",
    "Record",
    "Rejection",
    "RewriteReport",
    "SiteRecord",
    "SiteReport",
    "UnavailableError",
    "UncoveredError",
    "UncoveredWarning",
    "compile",
    "explain",
    "record",
    "reports",
    "route",
    "sparse_attention",
]
