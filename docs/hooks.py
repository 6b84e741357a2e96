"""Hooks of MkDocs: links from pages to files of the repository, which lie outside the folder of the pages.

Pictures and summaries under benchmarks/ become files of the site. Links to any other file keep their text alone, since
the site does not know where the repository can be read.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parent.parent
_COPIED = ("benchmarks/results/*/plots/*.png", "benchmarks/results/*/summary.md")
_LINK = re.compile(r"(!?)\[([^]\n]*)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def _place(path: str) -> str:
    return f"repository/{path}"


def on_files(files: Any, config: Any) -> Any:
    for pattern in _COPIED:
        for path in sorted(ROOT.glob(pattern)):
            place = _place(path.relative_to(ROOT).as_posix())
            inclusion = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, place, abs_src_path=str(path), inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(found: re.Match[str]) -> str:
        mark, text, target, _ = found.groups()
        inside = posixpath.normpath(posixpath.join("docs", folder, target))
        if inside.startswith("docs/"):
            return found[0]
        if not (ROOT / inside).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {target}, which does not exist")
        if files.get_file_from_path(_place(inside)) is None:
            return text
        return f"{mark}[{text}]({posixpath.relpath(_place(inside), folder or os.curdir)})"

    return _LINK.sub(replaced, markdown)
