"""The passes over a Dynamo graph, in order: match, lift_mask, unrepeat_kv, eligibility, rewrite."""

if not __name__.startswith("crisp_flex."):
    raise ImportError(f"import crisp_flex.passes, not {__name__!r}: one module, one name")
