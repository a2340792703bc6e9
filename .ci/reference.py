"""Build the API reference from the docstrings: python .ci/reference.py FOLDER. Warnings are errors."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pdoc
from jinja2 import ChoiceLoader, DictLoader

import scheduler.pytorch
from scheduler.solvers.registry import MODULES

ROOMS = (
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
"""A list of all modules: pdoc's own leads on to the first."""

MODULE = """{% extends "default/module.html.jinja2" %}{% block module_list_link %}
<a class="pdoc-button" href="{{ "../" * module.modulename.count(".") }}index.html">All modules</a>{% endblock %}"""
"""Every page leads back to the list."""


def build(folder: Path) -> None:
    """Write the pages of all public names, and of every registered solver, into a folder."""
    room = vars(scheduler.pytorch)
    room.update({name: getattr(scheduler.pytorch, name) for name in scheduler.pytorch.__all__})  # lazy until asked for
    pdoc.render.configure(docformat="numpy", show_source=False)
    own = DictLoader({"index.html.jinja2": INDEX, "module.html.jinja2": MODULE})
    pdoc.render.env.loader = ChoiceLoader([own, pdoc.render.env.loader])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc(*ROOMS, *sorted(set(MODULES.values())), output_directory=folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    build(Path(sys.argv[1]))
