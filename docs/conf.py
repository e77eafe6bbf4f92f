"""Sphinx configuration."""

from vpool import __version__

project = "vpool"
author = "The vpool developers"
release = __version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"vpool {release}"
exclude_patterns = ["_build"]

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
