"""The frame of the report: one HTML file that needs no network and no script, in light and dark, wide and narrow."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c2126; --soft: #57606a; --line: #d5dae0; --band: #f4f6f8;
  --link: #0a58a6; --warn: #fff4d6; --warn-line: #c98a00; --good: #11693a; --bad: #b42318; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181d; --ink: #e6e9ed; --soft: #a3adb8; --line: #39424c; --band: #1d232a;
    --link: #7fbcff; --warn: #352a0c; --warn-line: #e0a526; --good: #66d19e; --bad: #ff9085; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; }
.lead { font-size: 1.1rem; color: var(--soft); max-width: 60rem; }
.note { color: var(--soft); font-size: .9rem; }
nav { margin: 1rem 0; display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; }
a { color: var(--link); }
.notices { background: var(--warn); border: 1px solid var(--warn-line); border-left-width: .4rem; border-radius: .35rem;
  margin: 1.25rem 0; padding: .6rem 1rem; }
.notices ul { margin: .25rem 0; padding-left: 1.2rem; }
.scroll { overflow-x: auto; width: fit-content; max-width: 100%;
  border: 1px solid var(--line); border-radius: .35rem; margin: .75rem 0; }
table { border-collapse: separate; border-spacing: 0; font-size: .9rem; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
th, td { padding: .4rem .7rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { background: var(--band); font-weight: 600; vertical-align: bottom; }
td { min-width: 4.5rem; max-width: 26rem; overflow-wrap: break-word; }
table:not(.texts) th:first-child, table:not(.texts) td:first-child { position: sticky; left: 0; }
td:first-child { min-width: 12rem; max-width: 18rem; background: var(--page); }
.texts td { max-width: 46rem; }
.texts td:last-child { min-width: 11rem; overflow-wrap: anywhere; }
tbody tr:last-child td { border-bottom: 0; }
.number { text-align: right; white-space: nowrap; }
th.number { white-space: normal; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .75rem; background: #ffffff; color: #1c2126; border: 1px solid var(--line);
  border-radius: .35rem; min-width: 0; }
figure.wide { margin: 1rem 0; overflow-x: auto; }
figure svg { display: block; width: 100%; height: auto; }
figure.wide svg { min-width: 40rem; max-width: 72rem; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption { font-size: .85rem; color: #4a535c; margin-bottom: .5rem; }
figcaption strong { display: block; font-size: .95rem; color: #1c2126; }
.checks { list-style: none; margin: .75rem 0; padding: 0; }
.checks li { display: grid; grid-template-columns: 9.5rem 1fr; gap: .25rem 1rem; padding: .55rem 0;
  border-bottom: 1px solid var(--line); }
.verdict { font-weight: 600; white-space: nowrap; }
.holds { color: var(--good); } .fails { color: var(--bad); } .open { color: var(--soft); }
details { border: 1px solid var(--line); border-radius: .35rem; margin: .5rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; font-weight: 600; }
details[open] > summary { margin-bottom: .6rem; }
code { font-family: ui-monospace, "Liberation Mono", Menlo, Consolas, monospace; font-size: .92em; }
@media (max-width: 40rem) {
  body { padding: 1rem .75rem 3rem; }
  h1 { font-size: 1.4rem; }
  .checks li { grid-template-columns: 1fr; }
  figure { padding: .4rem; }
  th, td { padding: .4rem .5rem; }
  td { min-width: 3rem; max-width: 16rem; }
  td:first-child { min-width: 6.5rem; max-width: 9rem; }
  details { padding: .4rem .5rem; }
  .texts td:first-child { max-width: 12rem; }
}
@media print { body { max-width: none; } figure, .checks li { break-inside: avoid; } .scroll { overflow: visible; } }
"""


def escape(text: object) -> str:
    """Text as HTML shows it literally, in elements and in attributes; control characters become spaces."""
    return html.escape("".join(c if c.isprintable() or c == "\n" else " " for c in str(text)))


def inline_svg(svg: bytes, prefix: str, label: str) -> str:
    """One of our SVG files as an element of a page: it scales, screen readers have a text, its ids are its own."""
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {_attribute(name): _own(name, text, prefix) for name, text in element.attrib.items()}
    definitions = [child for child in root if child.tag == "metadata" or child.find("style") is not None]
    for child in definitions:  # its style sheet would apply to the whole page; ours says the same for figures
        root.remove(child)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(name: str) -> str:
    space, _, local = name.rpartition("}")
    return f"xlink:{local}" if space.endswith("xlink") else f"xml:{local}" if space else local


def _own(name: str, text: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{text}"
    if name.rpartition("}")[2] == "href":
        return re.sub(r"^#", f"#{prefix}-", text)
    return re.sub(r"url\(#", f"url(#{prefix}-", text)


def document(title: str, sections: Iterable[tuple[str, str, str]], opening: str) -> str:
    """The whole file: `opening`, links to the sections, and each section (id, heading, body); empty bodies left out."""
    present = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading, _ in present)
    body = "\n".join(
        f'<section id="{name}">\n<h2>{escape(heading)}</h2>\n{text}\n</section>' for name, heading, text in present
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="fedpact">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{opening}
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{body}
</main>
</body>
</html>
"""
