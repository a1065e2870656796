// Units and aligned columns.
#include "partitioner/report/text_table.h"

#include <algorithm>
#include <cstdio>

namespace smp::partitioner {

std::string with_unit(double number, const char* unit) {
  char text[48];
  std::snprintf(text, sizeof text, number < 10 ? "%.2f%s" : "%.1f%s", number, unit);
  return text;
}

std::string time_text(double us) {
  if (us < 1e3) return with_unit(us, " us");
  return us < 1e6 ? with_unit(us / 1e3, " ms") : with_unit(us / 1e6, " s");
}

std::string percent_text(double part) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %%", 100 * part);
  return text;
}

std::string aligned(const std::vector<Row>& rows, size_t left_aligned_column) {
  std::vector<size_t> width(rows.front().size(), 0);
  for (const Row& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
  }
  std::string text;
  for (const Row& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string padding(width[c] - row[c].size(), ' ');
      if (c > 0) text += " | ";
      text += c == left_aligned_column ? row[c] + padding : padding + row[c];
    }
    text += '\n';
  }
  return text;
}

}  // namespace smp::partitioner
