"""Links of the site that leave docs/: they become the name of the file (mkdocs.yml)."""

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
logger = logging.getLogger("mkdocs.hooks.site_links")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Replace a page's links to files outside docs/, and warn of missing ones."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def replaced(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if ":" in target or path.startswith("docs/"):
            return link[0]
        if not (ROOT / path).exists():
            logger.warning("%s links to %s, not there", page.file.src_uri, path)
        named = text.strip("`") in (path, posixpath.basename(path))
        return f"`{path}`" if named else f"{text} (`{path}`)"

    return LINK.sub(replaced, markdown)
