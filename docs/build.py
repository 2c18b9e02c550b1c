"""Builds this version of the site, in .cache/docs/site, with what its generator omits.

The versions that were built before stay beside it, and every page offers them.

Notebooks become pages of Markdown, with the outputs that they are committed with: so
their code looks as it does elsewhere, and the cell that installs the library is folded.
Links to them are written as GitHub needs them. After the build, every link and picture
of every page must lead to something that exists.
"""

import json
import re
import shutil
import subprocess
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import nbformat
from packaging.version import Version


ROOT = Path(__file__).parents[1]
BUILD = ROOT / ".cache" / "docs"  # the generator keeps what it has made in it, too
SOURCES, SITES = BUILD / "docs", BUILD / "site"
PACKAGE = (ROOT / "meshlayout" / "__init__.py").read_text()
VERSION = re.findall(r'__version__ = "(.*)"', PACKAGE)[0]
SITE = SITES / VERSION
FOOT = 'edit/main/docs/tutorials/(\\w+)\\.md"', r'blob/main/notebooks/\1.ipynb"'


def main() -> None:
    """Builds the site; exits with a status if it cannot, or a link leads nowhere."""
    _prepare()
    command = [sys.executable, "-m", "zensical", "build"]
    subprocess.run(command, cwd=BUILD, check=True)
    for path in SITE.rglob("*.html"):
        html = re.sub(
            r"(?<!<pre>)<code>([^<\n]+)</code>", _with_breaks, path.read_text()
        )
        # The page of a notebook has an edit link to the notebook.
        path.write_text(re.sub(*FOOT, html))
    _list_versions()
    if wrong := _dead_links():
        sys.exit("These lead nowhere:\n" + "\n".join(sorted(wrong)))


def _prepare() -> None:
    """Copies the pages to where the site is built from, and adds the notebooks."""
    for path in [*BUILD.glob("*"), *BUILD.glob(".*"), SITE]:
        if path != SITES:
            shutil.rmtree(path, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.py", "__pycache__")
    shutil.copytree(ROOT / "docs", SOURCES, ignore=ignored)
    config = (ROOT / "mkdocs.yml").read_text().replace("VERSION", VERSION)
    (BUILD / "mkdocs.yml").write_text(config)
    (SOURCES / "tutorials").mkdir()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = SOURCES / "tutorials" / f"{path.stem}.md"
        page.write_text(_as_markdown(path))
    notebook = r"\((?:\.\./)+notebooks/(\w+)\.ipynb"
    for path in SOURCES.rglob("*.md"):
        up = "../" * (len(path.relative_to(SOURCES).parts) - 1)
        text = re.sub(notebook, rf"({up}tutorials/\1.md", path.read_text())
        text = re.sub(r"(?s)```text\n(.*?)```", _text_block, text)
        if path.parent.name == "coming_from":  # whose tables have three columns
            text = f"---\nhide: [toc]\n---\n\n{text}"
        path.write_text(text)


def _text_block(block: re.Match[str]) -> str:
    """Returns a block whose lines wrap on a phone, unless it has columns."""
    columns = re.search(r"──|\S {4,}\S", block[1])
    return block[0] if columns else f"``` {{.text .wraps}}\n{block[1]}```"


def _list_versions() -> None:
    """Lists the versions for their menu; the first page opens the newest."""
    built = [path.parent.name for path in SITES.glob("*/index.html")]
    built.sort(key=Version, reverse=True)
    versions = [{"version": x, "title": x, "aliases": []} for x in built]
    (SITES / "versions.json").write_text(json.dumps(versions))
    page = f'<meta http-equiv="refresh" content="0; url={built[0]}/">\n'
    (SITES / "index.html").write_text(page)


def _with_breaks(code: re.Match[str]) -> str:
    words = code[1].split(" ")
    for number, word in enumerate(words):
        if len(word) > 30:
            words[number] = re.sub(r"(?<=.{6}[.(])(?=\w)", "<wbr>", word)
        elif "-" in word:
            words[number] = f'<span class="word">{word}</span>'
    return f"<code>{' '.join(words)}</code>"


def _dead_links() -> set[str]:
    """Returns the links and pictures of pages that lead nowhere."""
    pages = {path: _Page.read(path) for path in SITE.rglob("*.html")}
    return {
        f"{path.relative_to(SITE)}: {link}"
        for path, page in pages.items()
        if path.name != "404.html"  # whose links begin at the site's address
        for link in page.links
        if not _leads_somewhere(path, link, pages)
    }


def _leads_somewhere(path: Path, link: str, pages: dict[Path, "_Page"]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True  # of another site
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if target in pages and parts.fragment and not parts.fragment.startswith("__"):
        return unquote(parts.fragment) in pages[target].anchors
    return target.exists()


class _Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str | None] = set()

    @classmethod
    def read(cls, path: Path) -> "_Page":
        page = cls()
        page.feed(path.read_text())
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value and tag != "link":
                self.links.append(value)
            elif name in ("id", "name"):
                self.anchors.add(value)


def _as_markdown(path: Path) -> str:
    """Returns the text, code and outputs of a notebook."""
    parts: list[str] = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        source = f"```python\n{cell.source}\n```"
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            title, _, code = cell.source.partition("\n")
            title = title.removeprefix("# @title ").partition(" {")[0]
            lines = f"```python\n{code}\n```".splitlines()
            source = "\n".join([f'??? note "{title}"', *(f"    {x}" for x in lines)])
        parts += [source, *map(_output, cell.outputs)]
    return "\n\n".join(parts) + "\n"


def _output(output: Any) -> str:
    """Returns an output as HTML, in the richest of its forms."""
    data, kind = output.get("data", {}), "output"
    if "text/html" in data or "image/svg+xml" in data:
        # Blank lines would end the block of HTML.
        content = data.get("text/html") or data["image/svg+xml"]
        content = re.sub(r"\n\s*\n", "\n&#8203;\n", content.strip())
    elif "image/png" in data:
        content = (
            f'<img alt="" src="data:image/png;base64,{data["image/png"].strip()}">'
        )
    else:
        text = output.get("text") or data.get("text/plain", "")
        kind += "" if "──" in text else " sentences"  # which wrap, and tables do not
        content = f"<pre><code>{escape(text.rstrip())}</code></pre>"
    return f'<div class="{kind}">\n{content}\n</div>'


if __name__ == "__main__":
    main()
