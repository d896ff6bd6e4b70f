"""Takes `Any` out of what the API reference prints: what an argument may be is said in its text."""

from __future__ import annotations

import griffe


class WithoutAny(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **kwargs: object) -> None:
        for parameter in func.parameters:
            if str(parameter.annotation) == "Any":
                parameter.annotation = None
        if str(func.returns) == "Any":
            func.returns = None

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: object) -> None:
        if str(attr.annotation) == "Any":
            attr.annotation = None
