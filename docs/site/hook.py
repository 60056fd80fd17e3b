"""Pages of the site that lie outside docs/, and links between them.

In the repository every link is a path from its own file, as forges want it. A link to a file that
is no page of the site stays as it is, and fails the strict build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "rollout_files.md": "megatron_prefix/lab/data/README.md",
    "plans.md": "schedules/README.md",
    "log.md": "benchmarks/LOG.md",
}
"""Names of pages, and their files from the root of the repository."""
PAGES = {file: page for page, file in OUTSIDE.items()}
FENCE = re.compile(r"(^```.*?^```)", re.M | re.S)
WIDE = ("refusals.md", "related-work.md", "results.md", "support.md", "validation.md")
"""Pages whose tables need the room of the page's own table of contents."""
STYLE = "site.css"
INLINE_CODE = re.compile(r"(<pre.*?</pre>)|<code>(.*?)</code>", re.S)
WORD = re.compile(r"[^\s<>]+(?![^<]*>)")
"""A word outside of tags."""
LONG = 40  # characters: about what a narrow screen has on a line
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")


def on_config(config: Any) -> Any:
    """Lists trainers' pages, by their own titles."""
    (trainers,) = (entry for entry in config.nav if "Trainers" in entry)
    pages = sorted(path.name for path in (ROOT / "docs" / "trainers").glob("*.md"))
    trainers["Trainers"] = [f"trainers/{name}" for name in pages]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of OUTSIDE to those of docs/, and the style sheet."""
    style = str(Path(__file__).with_name(STYLE))
    files.append(File.generated(config, STYLE, abs_src_path=style))
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page's text, with links as paths between pages of the site."""
    here = page.file.src_uri
    if here in WIDE:
        page.meta["hide"] = ["toc"]
    return LINK.sub(lambda found: moved(found[1], here), indented(markdown))


def on_page_content(html: str, **_: Any) -> str:
    """A page's HTML, with whole identifiers, and the column's name in every cell of a table."""
    html = INLINE_CODE.sub(lambda found: found[1] or f"<code>{unbroken(found[2])}</code>", html)
    return re.sub(r"<table>.*?</table>", lambda found: with_columns(found[0]), html, flags=re.S)


def unbroken(code: str) -> str:
    """Inline code whose words break nowhere; a long one may break behind `/`, `=`, `.` or `,`."""

    def whole(found: re.Match[str]) -> str:
        word = found[0]
        parts = re.findall(r"[^/=.,]+[/=.,]*|[/=.,]+", word) if len(word) > LONG else [word]
        return "<wbr>".join(f'<span class="whole">{part}</span>' for part in parts)

    return WORD.sub(whole, code)


def with_columns(table: str) -> str:
    """A table whose cells name their column, for narrow screens."""
    names = [
        re.sub(r"<.*?>", "", name).strip()
        for name in re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.S)
    ]

    def row(found: re.Match[str]) -> str:
        cells = iter(names)

        def cell(start: re.Match[str]) -> str:
            name = next(cells, "").replace('"', "&quot;")
            return f'<td data-column="{name}"{start[1]}>' if name else start[0]

        return re.sub(r"<td\b([^>]*)>", cell, found[0])

    return re.sub(r"<tr\b.*?</tr>", row, table, flags=re.S)


def indented(markdown: str) -> str:
    """Lists as MkDocs reads them: what belongs to an item begins in the fifth column, and the next
    item after an empty line."""
    parts = FENCE.split(markdown)
    for number in range(0, len(parts), 2):
        text = re.sub(r"^ {2,3}(?=\S)", "    ", parts[number], flags=re.M)
        parts[number] = re.sub(r"^( {4}\S.*\n)(?=(?:-|\d+\.) )", r"\1\n", text, flags=re.M)
    return "".join(parts)


def moved(link: str, here: str) -> str:
    """A link of the page `here`, from its file's folder in the repository, from its page's."""
    file = OUTSIDE.get(here, f"docs/{here}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(file), link))
    if target not in PAGES and not target.startswith("docs/"):
        return link
    name = PAGES.get(target) or target.removeprefix("docs/")
    return posixpath.relpath(name, posixpath.dirname(here) or ".")
