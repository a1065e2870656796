"""The excerpts of docs/walk.md are the code of today.

  walk_test.py SOURCE_DIR [PAGE]

A block of code stands under a line that names its file and a function there: **path**, `Class::function`. Its lines stand in that
file, behind a line with the function's name, in their order, and one right behind the other unless a line of "…" is between them.
The block as a whole may be indented otherwise; spaces at the ends of lines do not count. Blocks of the language python are run by
tests/python/page_test.py.
"""

import pathlib
import re
import sys

CODE = re.compile(r"^(?P<above>[^\n]*)\n```(?P<language>cpp|py)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"\*\*([\w./-]+)\*\*, `([\w:.]+)`")
LEFT_OUT = "…"
LEAST_EXCERPTS = 10  # else the page has another form, and nothing is looked at


def indent_of(line):
    return len(line) - len(line.lstrip())


def count_from(excerpt, source, start):
    """How many lines of the excerpt stand in the source from `start` on, which is to be the first."""
    shift = indent_of(source[start]) - indent_of(excerpt[0])
    wanted = [" " * max(shift, 0) + line[max(-shift, 0) :] if line else line for line in excerpt]
    at, done = start, 0
    while done < len(wanted):
        if wanted[done].strip() == LEFT_OUT:
            done += 1
            continue
        end = next((n for n in range(done, len(wanted)) if wanted[n].strip() == LEFT_OUT), len(wanted))
        run = wanted[done:end]
        places = [at] if done == 0 else range(at, len(source))
        alike = {place: alike_at(run, source, place) for place in places}
        best = max(alike, key=alike.get, default=None)
        if best is None or alike[best] < len(run):
            return done + alike.get(best, 0)
        at, done = best + len(run), end
    return done


def alike_at(run, source, place):
    """How many lines of the run stand there, one right behind the other."""
    count = 0
    while count < len(run) and place + count < len(source) and run[count] == source[place + count]:
        count += 1
    return count


def fault_in(excerpt, source, function):
    """What of the excerpt is not in the source, or None."""
    *owners, name = re.split(r"::|\.", function)
    text = "\n".join(source)
    if not all(re.search(rf"\b{owner}\b", text) for owner in owners):
        return f"no {function} in the file"
    behind = next((n for n, line in enumerate(source) if re.search(rf"\b{name}\b", line)), None)
    if behind is None:
        return f"no {function} in the file"
    starts = [n for n in range(behind, len(source)) if source[n].strip() == excerpt[0].strip()]
    most = max((count_from(excerpt, source, start) for start in starts), default=0)
    return None if most == len(excerpt) else f"not in the file, at this place: {excerpt[most].strip()}"


def faults_in(root, page):
    for number, block in enumerate(CODE.finditer(page), 1):
        excerpt = [line.rstrip() for line in block["code"].splitlines()]
        where = f"block {number}, line {page[: block.start('code')].count(chr(10)) + 1}"
        named = NAMED.search(block["above"])
        if named is None:
            yield f"{where}: expected **path**, `function` in the line above, got {block['above']!r}"
            continue
        file, function = named.groups()
        if not (root / file).is_file():
            yield f"{where}: no file {file}; first line: {excerpt[0].strip()}"
            continue
        fault = fault_in(excerpt, [line.rstrip() for line in (root / file).read_text().splitlines()], function)
        if fault:
            yield f"{where}, {file}: {fault}"


def main():
    root = pathlib.Path(sys.argv[1])
    page = pathlib.Path(sys.argv[2] if sys.argv[2:] else root / "docs/walk.md").read_text()
    count = len(CODE.findall(page))
    faults = list(faults_in(root, page))
    if count < LEAST_EXCERPTS:
        faults.append(f"expected at least {LEAST_EXCERPTS} excerpts under lines that name their files, got {count}")
    print(*faults, f"{len(faults)} faults in {count} excerpts", sep="\n")
    sys.exit(1 if faults else 0)


main()
