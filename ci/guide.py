"""Used by ci/guide. `pages DIRECTORY` writes what mdbook makes a site of: the pages in the order of docs/guide/README.md, the other
pages of docs, those that they link to, and the files that these link to, at the paths they have in the repository.
`check DIRECTORY` follows the links of a site."""
import html.parser
import pathlib
import re
import shutil
import sys
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parent.parent
GUIDE = "docs/guide/README.md"
LINK = re.compile(r"\]\(([^)\s]+)\)")
BOOK = """[book]
title = "xwarp"
language = "en"
src = "src"

[output.html]
default-theme = "light"
"""


def links(page):
    """Paths below the root that a page links to, in order. Links within code are none."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for target in LINK.findall(text):
        path = target.split("#")[0]
        if path and ":" not in path:
            yield str((ROOT / page).parent.joinpath(path).resolve().relative_to(ROOT))


def title(page):
    first = next(line for line in (ROOT / page).read_text().splitlines() if line.startswith("# "))
    return first[2:].replace("[", "").replace("]", "").replace("`", "")


def in_site(path):
    """Where a page is in the site: mdbook makes index.html of index.md only."""
    return path.replace("README.md", "index.md")


def pages(directory):
    """README is the front page; the guide comes first, then what it leads to."""
    chapters, files, waiting = [], set(), ["README.md", GUIDE, *links(GUIDE), *links("README.md")]
    waiting += sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))
    while waiting:
        path = waiting.pop(0)
        if not (ROOT / path).is_file():
            sys.exit(f"{path} is linked, and is no file")
        if not path.endswith(".md"):
            files.add(path)
        elif path not in chapters:
            chapters.append(path)
            waiting.extend(links(path))
    parts = [
        ("", ["README.md"]),
        ("Guide", [page for page in chapters if page.startswith("docs/") and page.count("/") <= 1 or "/guide/" in page]),
        ("Measurements", sorted(page for page in chapters if page.startswith("docs/measurements/"))),
        ("Conformance", sorted(page for page in chapters if page.startswith("docs/conformance/"))),
        ("Decisions", sorted(page for page in chapters if page.startswith("docs/decisions/"))),
    ]
    listed = {page for _, part in parts for page in part}
    parts.append(("Project", [page for page in chapters if page not in listed]))
    source = directory / "src"
    summary = ["# Summary", ""]
    for name, part in parts:
        if name and part:
            summary += ["", f"# {name}", ""]
        for page in part:
            summary.append(("- " if name else "") + f"[{title(page)}]({in_site(page)})")
    for path in [*files, *chapters]:
        copy = source / in_site(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path in files:
            shutil.copy(ROOT / path, copy)
        else:
            copy.write_text(LINK.sub(lambda link: in_site(link.group(0)), (ROOT / path).read_text()))
    (source / "SUMMARY.md").write_text("\n".join(summary) + "\n")
    (directory / "book.toml").write_text(BOOK)


class Page(html.parser.HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.anchors.update(named[name] for name in ("id", "name") if named.get(name))
        self.links += [named[name] for name in ("href", "src") if named.get(name)]


def check(site):
    # The page of a missing address has a base that only a server knows; the one for printing has all chapters, whose links it keeps.
    found = {path: Page(path) for path in site.rglob("*.html") if path.name not in ("404.html", "print.html", "toc.html")}
    followed, broken = 0, []
    for path, page in found.items():
        for link in page.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            followed += 1
            target = path.parent.joinpath(urllib.parse.unquote(url.path)).resolve() if url.path else path
            anchors = found[target].anchors if target in found else None
            if not target.exists() or url.fragment and anchors is not None and url.fragment not in anchors:
                broken.append(f"{path.relative_to(site)}: {link}")
    if broken or len(found) < 20:
        sys.exit("links that lead nowhere:\n" + "\n".join(broken))
    print(f"{len(found)} pages, {followed} links, each leads somewhere")


if __name__ == "__main__":
    what, directory = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    {"pages": pages, "check": check}[what](directory)
