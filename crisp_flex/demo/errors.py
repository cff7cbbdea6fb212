"""DemoError: what a user of the demo can put right; the command line shows it as one sentence."""

from __future__ import annotations

from crisp_flex.errors import CrispFlexError


class DemoError(CrispFlexError):
    """The demo cannot go on, and its text says what to do about it."""
