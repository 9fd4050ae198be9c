"""A report as one HTML file: nothing in it is fetched from anywhere, and nothing in it runs but the pages' own script.

Data are base64 of zlib of JSON in elements that no browser runs: nothing that a run holds is markup. The policy in the
page's head allows the one script and the one style sheet, by their hashes, and pictures inside the data.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import zlib
from collections.abc import Mapping
from importlib import resources

from paravt.errors import DataError
from paravt.report.reading import to_json

_LEVEL = 6
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ENDS = re.compile(r"</(?:script|style)|<!--|<script", re.IGNORECASE)
_NO_SCRIPT = "This report needs JavaScript. Nothing in it comes from elsewhere."


def packed(value: object) -> str:
    """JSON as text of A-Z a-z 0-9 + / = alone."""
    return base64.b64encode(zlib.compress(to_json(value), _LEVEL)).decode("ascii")


def asset(name: str) -> str:
    """One of the pages' built files. Raises DataError if the package is without them."""
    try:
        text = (resources.files("paravt.report") / "assets" / name).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"paravt/report/assets/{name}: not in this package; build it: npm run build in web/") from error
    if _ENDS.search(text):
        raise DataError(f"paravt/report/assets/{name}: holds the end of its own element; build it again")
    return text


def element(id: str, data: str) -> str:
    """`data` is what `packed` gave."""
    if not _NAME.fullmatch(id):
        raise ValueError(f"not a name: {id!r}")
    return f'<script type="application/json+deflate" id="{id}">{data}</script>\n'


def policy(script: str, style: str, *, served: bool = False) -> str:
    """What the page may do; one that a server `served` may also ask it for data and videos."""
    more = "connect-src 'self'; media-src 'self'; " if served else ""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; {more}"
        "base-uri 'none'; form-action 'none'"
    )


def render(title: str, data: Mapping[str, str], script: str, style: str, *, served: bool = False) -> str:
    """The page. `data` are packed, by the ids of their elements; none if it asks its server for them."""
    allowed = html.escape(policy(script, style, served=served))
    title = title.encode("utf-8", "replace").decode()  # a directory's name may be no text
    return "".join([
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n',
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<div id=\"app\"></div>\n",
        f"<noscript>{_NO_SCRIPT}</noscript>\n",
        *(element(id, text) for id, text in data.items()),
        f"<script>{script}</script>\n</body>\n</html>\n",
    ])  # fmt: skip


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
