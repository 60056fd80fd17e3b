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
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")


def on_config(config: Any) -> Any:
    """Lists trainers' pages, by their own titles."""
    (trainers,) = (entry for entry in config.nav if "Trainers" in entry)
    pages = sorted(path.name for path in (ROOT / "docs" / "trainers").glob("*.md"))
    trainers["Trainers"] = [f"trainers/{name}" for name in pages]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of OUTSIDE to those of docs/."""
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page's text, with links as paths between pages of the site."""
    here = page.file.src_uri
    return LINK.sub(lambda found: moved(found[1], here), indented(markdown))


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
