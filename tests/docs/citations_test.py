"""Comments and pages cite what is in the repository: every page, every source that they name by its path, and
every heading that they link to exists.

  citations_test.py SOURCE_DIR
"""

import pathlib
import re
import sys
import xml.etree.ElementTree

TOPS = ("smp", "partitioner", "runtime", "python_bindings", "tests", "benchmarks", "examples", "tools", "cmake", "docs")
TEXTS = {".h", ".cpp", ".py", ".pyi", ".txt", ".cmake", ".in", ".sh", ".md", ""}
INVENTED = ("tests/arrows/", "tests/docs/citations_test.py")  # trees and pages that are made up
PAGE = re.compile(r"(?<![\w./$}@*-])[\w./-]*\w\.md\b")
SOURCE = re.compile(rf"(?<![\w./-])(?:{'|'.join(TOPS)})/[\w./-]*\w\.(?:h|cpp|py|cmake|svg)\b")
LINK = re.compile(r"\]\((?!http)([^)#]*)#?([^)]*)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
MOST_PICTURE_BYTES = 60_000


def texts_of(root):
    files = [file for file in root.iterdir() if file.is_file()]
    files += [file for top in TOPS for file in (root / top).rglob("*") if file.is_file()]
    for file in sorted(files):
        if file.suffix in TEXTS and not file.relative_to(root).as_posix().startswith(INVENTED):
            yield file, file.read_text()


def is_there(root, file, cited):
    """From the root, from the citing page, or a page of docs/ by its name."""
    return any((folder / cited).is_file() for folder in (root, file.parent, root / "docs"))


def missing_in(root, file, text):
    comment = {".md": "", ".py": "", ".h": "//", ".cpp": "//"}.get(file.suffix, "#")
    for number, line in enumerate(text.splitlines(), 1):
        for cited in PAGE.findall(line):
            if not is_there(root, file, cited.lstrip("/")):
                yield f"{file.relative_to(root)}:{number}: no page {cited} in the repository"
        said = line[line.find(comment):] if comment in line else ""
        for cited in SOURCE.findall(said):
            if "NAME" not in cited and not (root / cited).is_file():
                yield f"{file.relative_to(root)}:{number}: no file {cited} in the repository"
        if "§" in line:
            yield f"{file.relative_to(root)}:{number}: a section sign: say the fact, or link to the heading of a page"


def anchors_of(page):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(root, file, text):
    for target, anchor in LINK.findall(FENCED.sub("", text)):
        page = file.parent / target if target else file
        if not page.exists() or anchor and anchor not in anchors_of(page):
            yield f"{file.relative_to(root)}: no heading or file {target}#{anchor}"


def faulty_pictures(root, texts):
    """Drawings in docs/pictures are shown by a page, are SVG and small."""
    pages = "".join(text for file, text in texts if file.suffix == ".md")
    for picture in sorted((root / "docs/pictures").glob("*")):
        name = picture.relative_to(root)
        if f"pictures/{picture.name})" not in pages:
            yield f"{name}: no page shows it"
        if picture.stat().st_size > MOST_PICTURE_BYTES:
            yield f"{name}: expected at most {MOST_PICTURE_BYTES} bytes, got {picture.stat().st_size}"
        if not xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg"):
            yield f"{name}: expected SVG"


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    texts = list(texts_of(root))
    assert len(texts) > 100, f"expected the repository in {root}, got {len(texts)} texts"
    faults = [fault for file, text in texts for fault in missing_in(root, file, text)]
    faults += [fault for file, text in texts if file.suffix == ".md" for fault in broken_links(root, file, text)]
    faults += faulty_pictures(root, texts)
    print(*faults, f"{len(faults)} faults in {len(texts)} texts", sep="\n")
    sys.exit(1 if faults else 0)


main()
