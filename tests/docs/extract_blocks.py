"""Turns the code blocks of a page into C++ that tests compile and run.

  extract_blocks.py program PAGE OUT      the block with main(), as it stands
  extract_blocks.py refusals PAGE OUT     one test per block; a text block right after one is what it throws
  extract_blocks.py walk PAGE OUT         the blocks one after the other, as a page of walked_pages.cpp
  extract_blocks.py file PAGE OUT         the block whose first line is "// " and the name of OUT
"""

import pathlib
import re
import sys

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTSIDE, IN_BODY = "// outside\n", "// in the body\n"


def blocks_of(text):
    """(language, code, heading above) of each fenced block."""
    found = []
    for match in BLOCK.finditer(text):
        heading = re.findall(r"^#+ (.*)$", text[: match.start()], re.MULTILINE)
        found.append((match[1], match[2], heading[-1] if heading else ""))
    return found


def program(blocks):
    mains = [code for language, code, _ in blocks if language == "cpp" and "int main" in code]
    assert len(mains) == 1, f"expected one cpp block with main(), got {len(mains)}"
    return mains[0]


def name_of(number, heading):
    return f"Block{number}_" + re.sub(r"\W+", "", heading.title())


def refusals(blocks, suite):
    tests = []
    for number, (language, code, heading) in enumerate(blocks):
        if language != "cpp":
            continue
        outside, _, body = code.removeprefix(OUTSIDE).partition(IN_BODY) if code.startswith(OUTSIDE) else ("", "", code)
        expected = blocks[number + 1][1] if blocks[number + 1 :] and blocks[number + 1][0] == "text" else ""
        name = name_of(number, heading)
        tests.append(f"""
namespace {suite}{name} {{
{outside}
TEST({suite}, {name}) {{
  check_block([](TestModel& model, at::Tensor data, at::Tensor target) -> at::Tensor {{
    (void)model, (void)data;
{body}
    return target.sum();
  }}, R"text({expected.strip()})text");
}}
}}  // namespace {suite}{name}
""")
    return "".join(tests)


def walk(blocks, name):
    code = "".join(code for language, code, _ in blocks if language == "cpp")
    return f"""#include "tests/docs/walked_page.h"

namespace walked_page {{
namespace {{
int walk_{name}() {{
{code}  smp::shutdown();
  return 0;
}}
[[maybe_unused]] const bool has_{name} = pages().emplace("{name}", walk_{name}).second;
}}  // namespace
}}  // namespace walked_page
"""


def file(blocks, name):
    named = [code for language, code, _ in blocks if language == "cpp" and code.startswith(f"// {name}\n")]
    assert len(named) == 1, f"expected one cpp block that begins with // {name}, got {len(named)}"
    return named[0]


def main():
    form, page, out = sys.argv[1:]
    blocks = blocks_of(pathlib.Path(page).read_text())
    stem = pathlib.Path(page).stem
    named = {"refusals": stem.title() + "Page", "walk": stem, "file": pathlib.Path(out).name}
    make = {"program": program, "refusals": refusals, "walk": walk, "file": file}[form]
    code = make(blocks, named[form]) if form in named else make(blocks)
    pathlib.Path(out).write_text(f"// Made from {pathlib.Path(page).name}; change the page.\n{code}")


if __name__ == "__main__":
    main()
