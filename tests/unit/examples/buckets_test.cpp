// The lines of variable_length: their buckets and batches.
#include "examples/variable_length/buckets.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

namespace {

using namespace variable_length;

constexpr int64_t kEos = 1;

at::Tensor ids_of(const std::vector<int64_t>& ids) { return torch::tensor(ids, torch::kLong); }

// Lines of 1, 2, ... `count` words, each made of its own number from 10 on.
at::Tensor growing_lines(int64_t count) {
  std::vector<int64_t> ids;
  for (int64_t line = 1; line <= count; ++line) {
    ids.insert(ids.end(), static_cast<size_t>(line), 9 + line);
    ids.push_back(kEos);
  }
  return ids_of(ids);
}

void expect_rows(const at::Tensor& tensor, const std::vector<int64_t>& expected) {
  EXPECT_TRUE(torch::equal(tensor.flatten(), ids_of(expected))) << tensor;
}

TEST(Buckets, LinesAreFilledUpToTheNextMultiple) {
  const auto buckets = make_buckets(ids_of({5, 6, 7, kEos, 8, kEos, 2, 3, 4, 5, kEos}), {.width = 4, .max_length = 8});
  ASSERT_EQ(buckets.size(), 2);
  EXPECT_EQ(buckets[0].length(), 4);
  expect_rows(buckets[0].data, {kEos, 5, 6, 7, kEos, 8, kEos, kEos});
  expect_rows(buckets[0].target, {5, 6, 7, kEos, 8, kEos, kNoTarget, kNoTarget});
  expect_rows(buckets[1].data, {kEos, 2, 3, 4, 5, kEos, kEos, kEos});
  expect_rows(buckets[1].target, {2, 3, 4, 5, kEos, kNoTarget, kNoTarget, kNoTarget});
}

TEST(Buckets, LongLinesAreCutAndNoWordIsLost) {
  const auto buckets = make_buckets(growing_lines(30), {.width = 4, .max_length = 8});
  int64_t words = 0;
  for (const Bucket& bucket : buckets) {
    EXPECT_LE(bucket.length(), 8);
    words += bucket.target.ge(10).sum().item<int64_t>();
    // The word at each place is the target of the place before.
    EXPECT_TRUE(torch::equal(bucket.data.slice(1, 1), bucket.target.slice(1, 0, -1).clamp_min(kEos)));
  }
  EXPECT_EQ(words, 30 * 31 / 2);
}

TEST(Buckets, TextWithoutAnEndOrWithLengthsThatDoNotFitIsRefused) {
  EXPECT_THROW(make_buckets(ids_of({5, 6}), {}), c10::ValueError);
  EXPECT_THROW(make_buckets(ids_of({}), {}), c10::ValueError);
  EXPECT_THROW(make_buckets(ids_of({5, kEos}), {.width = 4, .max_length = 10}), c10::ValueError);
  EXPECT_THROW(make_buckets(ids_of({5, kEos}), {.width = 0}), c10::ValueError);
}

TEST(Buckets, FullBatchesAreShuffledAlikeForOneSeedAndNeverReachBehindTheEnd) {
  const auto buckets = make_buckets(growing_lines(30), {.width = 4, .max_length = 32});
  const auto keys = [&](int64_t seed) {
    std::vector<std::pair<int64_t, int64_t>> found;
    for (const Place& place : full_batches(buckets, 2, seed)) {
      EXPECT_LE(place.first + 2, buckets[static_cast<size_t>(place.bucket)].num_lines());
      found.emplace_back(place.bucket, place.first);
    }
    return found;
  };
  EXPECT_EQ(keys(1), keys(1));
  EXPECT_NE(keys(1), keys(2));
  const auto shuffled = keys(1);
  EXPECT_EQ(std::set(shuffled.begin(), shuffled.end()).size(), shuffled.size());
  EXPECT_EQ(shuffled.size(),
            6 * 2 + 2);  // 3 lines in the first bucket, 4 in each of six, 3 in the last
}

TEST(Buckets, AllBatchesHoldEachLineOnceAndTheirRestHasNoTarget) {
  const auto buckets = make_buckets(growing_lines(30), {.width = 4, .max_length = 32});
  int64_t targets = 0;
  for (const Place& place : all_batches(buckets, 5)) {
    const Bucket batch = get_lines(buckets[static_cast<size_t>(place.bucket)], place.first, 5);
    EXPECT_EQ(batch.num_lines(), 5);
    EXPECT_EQ(batch.data.sizes(), batch.target.sizes());
    targets += batch.target.ne(kNoTarget).sum().item<int64_t>();
  }
  EXPECT_EQ(targets, 30 * 31 / 2 + 30);
  EXPECT_TRUE(get_lines(buckets[0], 100, 3).target.eq(kNoTarget).all().item<bool>());
}

}  // namespace
