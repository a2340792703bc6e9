"""The site: README as its first page, the guide, the notebooks and the API reference. Build it with build.py."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import scheduler.pytorch  # noqa: E402

for name in scheduler.pytorch.__all__:  # these names are loaded on first access, which autodoc does not trigger
    setattr(scheduler.pytorch, name, getattr(scheduler.pytorch, name))

project = "scheduler"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.viewcode", "numpydoc", "myst_nb"]
exclude_patterns: list[str] = []
html_theme = "furo"
html_title = "scheduler"
html_copy_source = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
# The notebooks are run by CI on their own; the site shows the output that they were committed with.
nb_execution_mode = "off"
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
