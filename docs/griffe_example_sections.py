"""For mkdocs: an "Example:" of a docstring is shown as code, as an "Examples:" is."""

import re

import griffe


class ExampleSections(griffe.Extension):
    """Griffe knows the plural only, and would read >>> as a quotation."""

    def on_instance(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
