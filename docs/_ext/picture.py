"""`{picture} module.function`: a figure drawn from data while the page is built, once for light and once for dark."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, ClassVar

import matplotlib as mpl
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.util.docutils import SphinxDirective

mpl.use("svg")
import matplotlib.pyplot as plt

# Ids inside an SVG are random otherwise, and two builds would differ.
COMMON = {"svg.hashsalt": "refattn", "savefig.transparent": True, "font.size": 10, "axes.spines.top": False}
STYLES = {"light": ["default", COMMON], "dark": ["dark_background", COMMON]}


class PictureDirective(SphinxDirective):
    """Draws what a function of docs/_pictures returns, a matplotlib figure; `:alt:` says what is to be seen."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {"alt": directives.unchanged_required, "width": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """A figure with two images, of which the page's theme shows one, and the content as its caption."""
        module, _, name = self.arguments[0].rpartition(".")
        if not self.options.get("alt"):
            raise SphinxError(f"{self.get_location()}: {self.arguments[0]} has no :alt: text")
        draw = getattr(importlib.import_module(module), name)
        self.env.note_dependency(importlib.import_module(module).__file__)
        figure = nodes.figure(classes=["picture"])
        for style, settings in STYLES.items():
            image = nodes.image(
                alt=self.options["alt"], classes=[f"only-{style}"], uri=self.drawn(draw, style, settings)
            )
            if "width" in self.options:
                image["width"] = self.options["width"]
            figure += image
        if self.content:
            words = nodes.Element()
            self.state.nested_parse(self.content, self.content_offset, words)
            figure += nodes.caption("", "", *words.children[0].children)
        return [figure]

    def drawn(self, draw: Any, style: str, settings: list[Any]) -> str:
        """Draws one style beside what Sphinx keeps; the path from the page."""
        stem = self.arguments[0].replace(".", "-")
        folder = Path(self.env.doctreedir) / "pictures"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{stem}-{style}.svg"
        with plt.style.context(settings):
            made = draw()
            made.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})
            plt.close(made)
        return os.path.relpath(path, Path(self.env.doc2path(self.env.docname)).parent)


def setup(app: Sphinx) -> dict[str, Any]:
    """Adds the directive, and the folder of the functions that draw."""
    app.add_directive("picture", PictureDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "version": "1"}
