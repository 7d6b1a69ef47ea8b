"""`{computed}`: Python that runs while the page is built, shown with what it prints."""

from __future__ import annotations

import contextlib
import io
import traceback
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.util.docutils import SphinxDirective


class ExampleError(SphinxError):
    """An example raises."""

    category = "example"


class ComputedDirective(SphinxDirective):
    """Runs its content, which shares names with the other examples of the page, and shows what it printed.

    `:hide:` shows the output alone, `:markdown:` reads it as text of the page instead of as preformatted.
    """

    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {"hide": directives.flag, "markdown": directives.flag}

    def run(self) -> list[nodes.Node]:
        """The code and its output."""
        self.assert_has_content()
        # The edition for print has the chapters of the specification alone.
        if self.config.root_doc == "print" and not self.env.docname.startswith("spec/"):
            return []
        code, printed = "\n".join(self.content), io.StringIO()
        names = self.env.temp_data.setdefault("computed names", {"__name__": self.env.docname})
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(code, self.get_location(), "exec"), names)  # noqa: S102 - code of these pages
        except Exception as fault:  # whatever an example raises stops the build
            raise ExampleError(f"{self.get_location()}: {traceback.format_exc(limit=-1)}") from fault
        made: list[nodes.Node] = []
        if "hide" not in self.options:
            made.append(nodes.literal_block(code, code, language="python"))
        if "markdown" in self.options:
            holder = nodes.container(classes=["computed"])
            self.state.nested_parse(StringList(printed.getvalue().splitlines(), "computed"), 0, holder)
            made.append(holder)
        elif output := printed.getvalue().rstrip():
            made.append(nodes.literal_block(output, output, language="text", classes=["computed"]))
        return made


def setup(app: Sphinx) -> dict[str, Any]:
    """Adds the directive."""
    app.add_directive("computed", ComputedDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "version": "1"}
