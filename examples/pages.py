# SPDX-License-Identifier: Apache-2.0
"""Pages of HTML: tables, and figures side by side, each with a link to the CSV beside it."""

import html

STYLE = """
body { font-family: sans-serif; margin: 2em; max-width: 1300px }
img { max-width: 100% } td, th { padding: 0.2em 0.8em; text-align: right; border-bottom: 1px solid #ccc }
td:first-child, th:first-child { text-align: left } .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1em }
"""


def document(title, parts):
    """Returns a page.

    Args:
        title: text.
        parts: HTML, one after the other.
    """
    title = html.escape(title)
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"
    return "\n".join([head, f"<h1>{title}</h1>", *parts, "</html>\n"])


def table(head, rows):
    """Returns a table; `head` and `rows` are of text."""
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(x)}</td>" for x in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{lines}</table>"


def figures(names):
    """Returns PNGs in two columns; `names` are those of files in the page's folder."""
    shown = (
        f"<figure><a href='{name}'><img src='{name}' alt='{name}' loading='lazy'></a>"
        f"<figcaption><a href='{name[:-4]}.csv'>numbers</a></figcaption></figure>"
        for name in names
    )
    return "\n".join(["<div class='pair'>", *shown, "</div>"])
