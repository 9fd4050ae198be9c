"""The ask page: one answer that has its script and its style inside."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from fastapi import Response

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>ParaVT: ask</title>
<style>{style}</style>
</head>
<body>
<div id="app"></div>
<noscript>This page needs JavaScript. The same can be asked with any HTTP client: see docs/serve.md.</noscript>
<script>{script}</script>
</body>
</html>
"""


def ask_page() -> Response:
    """The page, with a policy that lets nothing run or load but what is in it and this server's own answers."""
    assets = resources.files("paravt.report") / "assets"
    script, style = ((assets / name).read_text(encoding="utf-8") for name in ("ask.js", "ask.css"))
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; img-src data:; "
        "media-src 'self'; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    )
    page = _PAGE.format(style=style, script=script)
    return Response(page, media_type="text/html", headers={"Content-Security-Policy": policy})


def _source(text: str) -> str:
    """Names an inline script or style by its content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
