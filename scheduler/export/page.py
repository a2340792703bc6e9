"""The frame and the style that all HTML pages of the package share."""

from __future__ import annotations

from html import escape

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin-bottom: 0; }
h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 0.8rem 0.2rem 0; border-bottom: 1px solid #ddd; }
"""


def html_page(title: str, style: str, body: str) -> str:
    """Return an HTML page that loads nothing from elsewhere and runs no scripts.

    Parameters
    ----------
    title : str
        Plain text, also of the heading.
    style : str
        Rules that follow those of every page, as CSS.
    body : str
        What follows the heading, as HTML.
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""
