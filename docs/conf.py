"""Sphinx: ``python -m sphinx docs site`` turns these pages and the library's docstrings into HTML."""

import jax_twoshot

project = "jax_twoshot"
version = release = jax_twoshot.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
default_role = "py:obj"  # `name` in a docstring: a link where there is such a name
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
html_theme_options = {"description": "All-reduce for tensor-parallel decode in JAX", "page_width": "70rem"}
