"""What the site does beyond its theme.

Notebooks become pages of Markdown, with the outputs that they are committed with: so
their code looks as it does elsewhere, and the cell that installs the library is folded.
Links to them are written as GitHub needs them. After the build, every link and picture
of every page must lead to something that exists, for MkDocs looks neither at HTML nor
at links that leave the folder.
"""

import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import nbformat
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File


ROOT = Path(__file__).parents[1]


def on_config(config: Any) -> Any:
    """Shows the version, and where the changes are, at the foot of each page."""
    source = (ROOT / "meshlayout" / "__init__.py").read_text()
    version = re.findall(r'__version__ = "(.*)"', source)[0]
    changes = f"{config.repo_url}/blob/main/CHANGELOG.md"
    config.copyright = f'meshlayout {version}, <a href="{changes}">changes</a>'
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the notebooks as pages."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        name = f"tutorials/{path.stem}.md"
        files.append(File.generated(config, name, content=_as_markdown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links to notebooks into links to their pages."""
    up = "../" * page.file.src_uri.count("/")
    notebook = r"\((?:\.\./)+notebooks/(\w+)\.ipynb"
    return re.sub(notebook, rf"({up}tutorials/\1.md", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Lets code break between names, and nowhere in an option such as `--model`."""
    return re.sub(r"(?<!<pre>)<code>([^<\n]+)</code>", _with_breaks, html)


def _with_breaks(code: re.Match[str]) -> str:
    words = code[1].split(" ")
    for number, word in enumerate(words):
        if "-" in word:
            words[number] = f'<span class="word">{word}</span>'
        elif len(word) > 30:
            words[number] = re.sub(r"(?<=\w{6}[.(])(?=\w)", "<wbr>", word)
    return f"<code>{' '.join(words)}</code>"


def on_page_context(context: Any, page: Any, config: Any, **_: Any) -> Any:
    """Gives the page of a notebook an edit link."""
    folder, _, name = page.file.src_uri.partition("/")
    if folder == "tutorials":
        notebook = f"notebooks/{name.removesuffix('.md')}.ipynb"
        page.edit_url = f"{config.repo_url}/blob/main/{notebook}"
    return context


def on_post_build(config: Any) -> None:
    """Fails if a link or a picture of a page leads nowhere."""
    site = Path(config.site_dir).resolve()
    pages = {path: _Page.read(path) for path in site.rglob("*.html")}
    wrong = [
        f"{path.relative_to(site)}: {link}"
        for path, page in pages.items()
        if path.name != "404.html"  # whose links begin at the site's address
        for link in page.links
        if not _leads_somewhere(path, link, pages)
    ]
    if wrong:
        raise PluginError("These lead nowhere:\n" + "\n".join(sorted({*wrong})))


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
