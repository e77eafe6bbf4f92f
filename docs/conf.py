"""Sphinx configuration."""

import sys
from pathlib import Path

from vpool import __version__

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

project = "vpool"
author = "The vpool developers"
release = __version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"vpool {release}"
exclude_patterns = ["_build", "_pictures"]
html_extra_path = ["_pictures/two_streams.html"]

# In docstrings single backticks mark any name, whether or not there is a page to link to.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False
napoleon_use_ivar = False
nitpick_ignore = [("py:class", "numpy.ndarray"), ("py:class", "pathlib.Path")]
# A section "Raises" may name several exceptions at once.
nitpick_ignore_regex = [("py:exc", r".*,.*")]


def setup(app):
    """Draw the pictures before the pages are read, so that none is older than what draws it."""
    import pictures

    pictures.make(HERE / "_pictures")
