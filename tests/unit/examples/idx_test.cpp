// The data of mnist: IDX files, good and bad ones, and batches of them.
#include "examples/mnist/idx.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>

#include "examples/mnist/batches.h"
#include "tests/unit/examples/temporary_folder.h"

namespace {

using namespace mnist;

template <typename Function>
std::string error_of(Function function) {
  try {
    function();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

#define EXPECT_ERROR(call, text) EXPECT_NE(error_of([&] { call; }).find(text), std::string::npos) << error_of([&] { call; })

std::string bytes(const std::vector<int>& values) { return {values.begin(), values.end()}; }

// The file's text: its head, then `data`.
std::string idx(const std::vector<int>& sizes, const std::vector<int>& data) {
  std::string text = bytes({0, 0, 8, static_cast<int>(sizes.size())});
  for (const int size : sizes) text += bytes({size >> 24, size >> 16 & 255, size >> 8 & 255, size & 255});
  return text + bytes(data);
}

std::vector<int> counted(int count) {
  std::vector<int> numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// Three images of 2 x 3 to learn from, one to test with.
void write_digits(const TemporaryFolder& folder) {
  folder.write("train-images-idx3-ubyte", idx({3, 2, 3}, counted(18)));
  folder.write("train-labels-idx1-ubyte", idx({3}, {9, 0, 5}));
  folder.write("t10k-images-idx3-ubyte", idx({1, 2, 3}, {0, 1, 127, 128, 254, 255}));
  folder.write("t10k-labels-idx1-ubyte", idx({1}, {7}));
}

TEST(Idx, ReadsSizesAndBytes) {
  const TemporaryFolder folder;
  folder.write("file", idx({2, 1, 300}, std::vector<int>(600, 200)));
  const at::Tensor tensor = read_idx(folder.path("file"), 3);
  EXPECT_EQ(tensor.sizes(), (std::vector<int64_t>{2, 1, 300}));
  EXPECT_EQ(tensor.scalar_type(), torch::kByte);
  EXPECT_TRUE(tensor.eq(200).all().item<bool>());
}

TEST(Idx, RefusesWhatIsNoIdxFile) {
  const TemporaryFolder folder;
  EXPECT_ERROR(read_idx(folder.path("absent"), 1), "absent, which does not exist or cannot be read");
  EXPECT_ERROR(read_idx(folder.path(), 1), "which does not exist or cannot be read");
  folder.write("empty", "");
  EXPECT_ERROR(read_idx(folder.path("empty"), 1), "got a file of 0 bytes");
  folder.write("packed", bytes({0x1f, 0x8b, 8, 0, 0, 0, 0, 0}));
  EXPECT_ERROR(read_idx(folder.path("packed"), 1), "Unpack it with gunzip");
  folder.write("floats", bytes({0, 0, 13, 1, 0, 0, 0, 1, 0, 0, 0, 0}));
  EXPECT_ERROR(read_idx(folder.path("floats"), 1), "to start with the bytes 0 0 8 (IDX, unsigned bytes), got 0 0 13");
  folder.write("text", "P5 28 28 255\n");
  EXPECT_ERROR(read_idx(folder.path("text"), 1), "got 80 53 32");
}

TEST(Idx, RefusesOtherDimensionsThanExpected) {
  const TemporaryFolder folder;
  folder.write("labels", idx({3}, {1, 2, 3}));
  EXPECT_ERROR(read_idx(folder.path("labels"), 3), "expected 3 dimensions");
  EXPECT_ERROR(read_idx(folder.path("labels"), 3), "got 1");
}

TEST(Idx, RefusesAFileThatIsCutShortOrTooLong) {
  const TemporaryFolder folder;
  folder.write("head", idx({3, 2}, {}).substr(0, 9));
  EXPECT_ERROR(read_idx(folder.path("head"), 2), "got a file of 9 bytes. It is cut short");
  folder.write("short", idx({3, 2}, counted(5)));
  EXPECT_ERROR(read_idx(folder.path("short"), 2), "expected data of sizes [3, 2]");
  EXPECT_ERROR(read_idx(folder.path("short"), 2), "got 5 bytes of data");
  folder.write("long", idx({3, 2}, counted(7)));
  EXPECT_ERROR(read_idx(folder.path("long"), 2), "got 7 bytes of data");
  folder.write("none", idx({3, 2}, {}));
  EXPECT_ERROR(read_idx(folder.path("none"), 2), "got 0 bytes of data");
}

TEST(Idx, RefusesSizesThatOverflowOrAreZero) {
  const TemporaryFolder folder;
  const int huge = 0x7fffffff;
  folder.write("huge", idx({huge, huge, huge}, counted(8)));
  EXPECT_ERROR(read_idx(folder.path("huge"), 3), "got 8 bytes of data");
  // 2^32 as a product of sizes that fit: 32 bits would be zero bytes.
  folder.write("wraps", idx({65536, 65536}, {}));
  EXPECT_ERROR(read_idx(folder.path("wraps"), 2), "got 0 bytes of data");
  folder.write("zero", idx({0, 4}, {}));
  EXPECT_ERROR(read_idx(folder.path("zero"), 2), "got an empty dimension");
}

TEST(Digits, AreFourFilesOfAFolder) {
  const TemporaryFolder folder;
  write_digits(folder);
  const Digits digits = read_digits(folder.path());
  EXPECT_EQ(digits.train.pixels.sizes(), (std::vector<int64_t>{3, 2, 3}));
  EXPECT_TRUE(torch::equal(digits.train.labels, torch::tensor({9, 0, 5}, torch::kLong)));
  EXPECT_EQ(digits.train.pixels[2][1][2].item<int>(), 17);
  EXPECT_EQ(digits.test.size(), 1);
}

TEST(Digits, MayHaveADotInTheirNames) {
  const TemporaryFolder folder;
  write_digits(folder);
  std::filesystem::rename(folder.path("train-images-idx3-ubyte"), folder.path("train-images.idx3-ubyte"));
  EXPECT_EQ(read_digits(folder.path()).train.size(), 3);
}

TEST(Digits, RefuseFilesThatAreMissingOrDoNotFitTogether) {
  const TemporaryFolder folder;
  EXPECT_ERROR(read_digits(folder.path("absent")), "expected a folder with IDX files");
  write_digits(folder);
  folder.write("t10k-labels-idx1-ubyte", idx({1}, {10}));
  EXPECT_ERROR(read_digits(folder.path()), "expected labels from 0 to 9");
  folder.write("t10k-labels-idx1-ubyte", idx({2}, {1, 2}));
  EXPECT_ERROR(read_digits(folder.path()), "expected a label for each of 1 images, got 2");
  folder.write("t10k-labels-idx1-ubyte", idx({1}, {1}));
  folder.write("t10k-images-idx3-ubyte", idx({1, 3, 2}, counted(6)));
  EXPECT_ERROR(read_digits(folder.path()), "[2, 3] for training and [3, 2] for the test");
  folder.write("t10k-images-idx3-ubyte", idx({1}, {1}));
  EXPECT_ERROR(read_digits(folder.path()), "are the names exchanged?");
  std::filesystem::remove(folder.path("t10k-images-idx3-ubyte"));
  EXPECT_ERROR(read_digits(folder.path()), "t10k-images-idx3-ubyte, which does not exist");
}

TEST(Batches, HaveTheirRowsInTheOrderGiven) {
  const TemporaryFolder folder;
  write_digits(folder);
  const Digits digits = read_digits(folder.path());
  const Batch batch = get_batch(digits.train, torch::tensor({1, 2, 0}, torch::kLong), 1, 2);
  EXPECT_EQ(batch.images.sizes(), (std::vector<int64_t>{2, 1, 2, 3}));
  EXPECT_TRUE(torch::equal(batch.labels, torch::tensor({5, 9}, torch::kLong)));
  EXPECT_EQ(batch.images[0][0][1][2].item<float>(), 17.0F / 255);
  EXPECT_EQ(batch.images[1][0][0][0].item<float>(), 0);
}

TEST(Batches, AreFilledWithRowsThatNobodyCounts) {
  const TemporaryFolder folder;
  write_digits(folder);
  const Digits digits = read_digits(folder.path());
  const Batch last = get_filled_batch(digits.train, 2, 3);
  EXPECT_TRUE(torch::equal(last.labels, torch::tensor({int64_t{5}, kNoLabel, kNoLabel})));
  EXPECT_EQ(last.images[0][0][0][0].item<float>(), 12.0F / 255);
  EXPECT_EQ(last.images.narrow(0, 1, 2).count_nonzero().item<int64_t>(), 0);
  EXPECT_TRUE(get_filled_batch(digits.train, 6, 3).labels.eq(kNoLabel).all().item<bool>());
}

TEST(Batches, AreShuffledAlikeForOneSeed) {
  const at::Tensor order = shuffled(50, 3);
  EXPECT_TRUE(torch::equal(order, shuffled(50, 3)));
  EXPECT_FALSE(torch::equal(order, shuffled(50, 4)));
  EXPECT_TRUE(torch::equal(std::get<0>(order.sort()), torch::arange(50)));
}

}  // namespace
