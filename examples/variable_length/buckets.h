// Lines of text of many lengths, sorted into buckets of a few. No randomness but that of the seed given.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace variable_length {

/// Target of a place behind the end of a line: cross-entropy's ignore_index.
constexpr int64_t kNoTarget = -100;

/// Lines of one length, the shorter ones filled up at their ends.
struct Bucket {
  at::Tensor data;    // [lines, length], int64: <eos>, then the words
  at::Tensor target;  // [lines, length]: the words, then <eos>, then kNoTarget
  int64_t length() const { return data.size(1); }
  int64_t num_lines() const { return data.size(0); }
};

struct BucketOptions {
  int64_t width = 4;        // lengths are multiples of it
  int64_t max_length = 24;  // longer lines are cut into parts; a multiple of `width`
};

/// ids: [tokens], int64, as Vocabulary::encode gives them. By rising length; lengths that no line has are left out. Throws
/// c10::ValueError for ids that do not end with <eos>, and for widths and lengths that do not fit together.
std::vector<Bucket> make_buckets(const at::Tensor& ids, const BucketOptions& options);

/// Lines first ... first + lines - 1 of a bucket.
struct Place {
  int64_t bucket = 0;
  int64_t first = 0;
};

/// Every batch of `lines` lines, shuffled over all buckets alike on every rank that gives the same
/// seed; what a bucket leaves over is left out.
std::vector<Place> full_batches(const std::vector<Bucket>& buckets, int64_t lines, int64_t seed);

/// Every line once, bucket by bucket, in batches of `lines` places of which the last may lie behind the bucket's end.
std::vector<Place> all_batches(const std::vector<Bucket>& buckets, int64_t lines);

/// Lines first ... first + lines - 1; those behind the end have no target at all.
Bucket get_lines(const Bucket& bucket, int64_t first, int64_t lines);

}  // namespace variable_length
