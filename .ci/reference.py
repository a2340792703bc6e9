"""Build the API reference from the docstrings: python .ci/reference.py FOLDER. Warnings are errors."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pdoc
from jinja2 import ChoiceLoader, DictLoader

import scheduler.pytorch
from scheduler.solvers.registry import MODULES

PAGES = (
    "scheduler",
    "scheduler.pytorch",
    "scheduler.pytorch.models.catalog",
    "scheduler.plots",
    "scheduler.export.html_report",
    "scheduler.export.chrome_trace",
    "scheduler.comparisons.table",
    "scheduler.problem",
    "scheduler.solution",
    "scheduler.solvers.registry",
    "scheduler.errors",
)
INDEX = """{% set root_module_name = false %}{% extends "default/index.html.jinja2" %}{% block content %}
<main class="pdoc"><section class="module-info"><h1>scheduler</h1>
{% for name, module in all_modules.items() %}
<p><a href="{{ name.replace(".", "/") }}.html">{{ name }}</a><br>{{ module.docstring.split("\n")[0] }}</p>
{% endfor %}
</section></main>{% endblock %}"""
"""A list of all modules; the index of pdoc redirects to the first module instead."""

MODULE = """{% extends "default/module.html.jinja2" %}{% block module_list_link %}
<a class="pdoc-button" href="{{ "../" * module.modulename.count(".") }}index.html">All modules</a>{% endblock %}"""
"""A link from every page back to the list."""


def build(folder: Path) -> None:
    """Write the pages of all public names and of every registered solver into a folder."""
    for name in scheduler.pytorch.__all__:  # these names are loaded on first access, which pdoc does not trigger
        setattr(scheduler.pytorch, name, getattr(scheduler.pytorch, name))
    pdoc.render.configure(docformat="numpy", show_source=False)
    templates = DictLoader({"index.html.jinja2": INDEX, "module.html.jinja2": MODULE})
    pdoc.render.env.loader = ChoiceLoader([templates, pdoc.render.env.loader])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc(*PAGES, *sorted(set(MODULES.values())), output_directory=folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    build(Path(sys.argv[1]))
