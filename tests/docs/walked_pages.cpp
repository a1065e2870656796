// Usage: walked_pages PAGE. Runs the C++ blocks of a page of docs/ in the current folder.
#include <iostream>

#include "tests/docs/walked_page.h"

int main(int argc, char** argv) {
  const auto page = walked_page::pages().find(argc == 2 ? argv[1] : "");
  if (page == walked_page::pages().end()) {
    std::cerr << "usage: walked_pages PAGE, one of";
    for (const auto& [name, run] : walked_page::pages()) std::cerr << ' ' << name;
    std::cerr << '\n';
    return 2;
  }
  return page->second();
}
