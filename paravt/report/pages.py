"""Reports from templates: one HTML file with its pictures inside, and Markdown. Whatever a model wrote is escaped."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#!|~&$])")
# What a viewer may not show, or show as something else: control and bidirectional characters; and lone surrogates,
# which no file can hold.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def render_html(template: str, values: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """`template` is a file of `paravt/report/templates`; `picture(name)` in it gives one of `pictures` (PNG) as an
    image."""
    environment = _environment(autoescape=True)

    def picture(name: str) -> Markup:
        data = base64.b64encode(pictures[name]).decode()
        return Markup('<img alt="{}" src="data:image/png;base64,{}">').format(name, data)

    return environment.get_template(template).render(values, picture=picture, pictures=list(pictures))


def render_markdown(template: str, values: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """`picture(name)` in the template links to the file that `pictures` names. Texts need the filters `md` (in a line)
    or `block` (lines of code)."""
    environment = _environment(autoescape=False)
    environment.filters |= {"md": markdown_line, "block": markdown_block}

    def picture(name: str) -> str:
        return f"![{name}]({pictures[name]})"

    return environment.get_template(template).render(values, picture=picture, pictures=list(pictures))


def markdown_line(text: object) -> str:
    """Text within a line of Markdown, or a cell of a table, that cannot be anything but text."""
    return _MARKDOWN.sub(r"\\\1", " ".join(seen(str(text)).split()))


def markdown_block(text: object) -> str:
    """Lines as a block of code, between fences longer than any that they hold."""
    lines = seen(str(text))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", lines)), default=0))
    return f"{fence}text\n{lines}\n{fence}"


def seen(text: str) -> str:
    """Without characters that hide or reorder others."""
    return _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text)


def _environment(autoescape: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("paravt.report", "templates"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["seen"] = seen
    return environment
