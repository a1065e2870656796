// Cutting lines, filling them up, choosing batches.
#include "examples/variable_length/buckets.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <random>

#include "examples/transformer_lm/corpus.h"

namespace variable_length {
namespace {

constexpr int64_t kEndOfLine = transformer_lm::Vocabulary::kEndOfLine;

// What the places of a bucket are filled with, line by line.
struct Lines {
  std::vector<int64_t> data, target;
};

// One line without its <eos>, which stands before the first word as a start, and after the last.
void add_line(std::map<int64_t, Lines>& by_length, const int64_t* words, int64_t count, int64_t width) {
  const int64_t length = (count + 1 + width - 1) / width * width;
  Lines& lines = by_length[length];
  lines.data.push_back(kEndOfLine);
  lines.data.insert(lines.data.end(), words, words + count);
  lines.data.insert(lines.data.end(), length - count - 1, kEndOfLine);
  lines.target.insert(lines.target.end(), words, words + count);
  lines.target.push_back(kEndOfLine);
  lines.target.insert(lines.target.end(), length - count - 1, kNoTarget);
}

at::Tensor to_rows(const std::vector<int64_t>& values, int64_t length) {
  return torch::tensor(values, torch::kLong).view({-1, length});
}

// `rows` with `count` in all, those that are missing filled with `value`.
at::Tensor filled(const at::Tensor& rows, int64_t count, int64_t value) {
  return torch::cat({rows, torch::full({count - rows.size(0), rows.size(1)}, value, torch::kLong)});
}

}  // namespace

std::vector<Bucket> make_buckets(const at::Tensor& ids, const BucketOptions& options) {
  TORCH_CHECK_VALUE(options.width > 0 && options.max_length > 0 && options.max_length % options.width == 0,
                    "variable_length: expected a greatest length that is a multiple of the width of buckets, got ",
                    options.max_length, " and ", options.width, ". Change --max-length or --bucket-width.");
  const int64_t* first = ids.const_data_ptr<int64_t>();
  const int64_t* end = first + ids.numel();
  TORCH_CHECK_VALUE(ids.numel() > 0 && end[-1] == kEndOfLine,
                    "variable_length: expected text that ends with an end of line, got ", ids.numel(), " tokens.");
  std::map<int64_t, Lines> by_length;
  for (const int64_t* word = first; word < end; ++word) {  // ++: over the <eos>
    const int64_t* eos = std::find(word, end, kEndOfLine);
    while (word < eos) {
      const int64_t count = std::min<int64_t>(eos - word, options.max_length - 1);
      add_line(by_length, word, count, options.width);
      word += count;
    }
  }
  std::vector<Bucket> buckets;
  for (const auto& [length, lines] : by_length) {
    buckets.push_back({to_rows(lines.data, length), to_rows(lines.target, length)});
  }
  return buckets;
}

std::vector<Place> full_batches(const std::vector<Bucket>& buckets, int64_t lines, int64_t seed) {
  std::vector<Place> places = all_batches(buckets, lines);
  std::erase_if(places, [&](const Place& place) {
    return place.first + lines > buckets[static_cast<size_t>(place.bucket)].num_lines();
  });
  std::mt19937_64 random(static_cast<uint64_t>(seed));
  for (size_t i = places.size(); i > 1; --i) std::swap(places[i - 1], places[random() % i]);  // Fisher and Yates
  return places;
}

std::vector<Place> all_batches(const std::vector<Bucket>& buckets, int64_t lines) {
  std::vector<Place> places;
  for (size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    for (int64_t first = 0; first < buckets[bucket].num_lines(); first += lines) {
      places.push_back({static_cast<int64_t>(bucket), first});
    }
  }
  return places;
}

Bucket get_lines(const Bucket& bucket, int64_t first, int64_t lines) {
  const int64_t begin = std::min(first, bucket.num_lines());
  const int64_t end = std::min(first + lines, bucket.num_lines());
  return {filled(bucket.data.slice(0, begin, end), lines, kEndOfLine),
          filled(bucket.target.slice(0, begin, end), lines, kNoTarget)};
}

}  // namespace variable_length
