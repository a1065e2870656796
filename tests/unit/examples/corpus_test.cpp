// The text of transformer_lm: splits, words, numbers, batches.
#include "examples/transformer_lm/corpus.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "tests/unit/examples/temporary_folder.h"

namespace {

using namespace transformer_lm;
using Words = std::vector<std::string>;

template <typename Error, typename Function>
std::string error_of(Function function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

std::vector<int64_t> to_vector(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

std::string lines(int first, int last) {
  std::string text;
  for (int i = first; i < last; ++i) text += "line " + std::to_string(1000 + i) + "\n";
  return text;
}

TEST(CorpusText, AFolderHasOneFilePerSplit) {
  const TemporaryFolder folder;
  folder.write("wiki.train.tokens", "a\nb\n");
  folder.write("wiki.valid.tokens", "c\n");
  folder.write("wiki.test.tokens", "d\n");
  folder.write(".train.swp", "hidden");
  folder.write("README", "other");
  const Text text = read_text(folder.path());
  EXPECT_EQ(text.train, "a\nb\n");
  EXPECT_EQ(text.valid, "c\n");
  EXPECT_EQ(text.test, "d\n");
}

TEST(CorpusText, TheSplitsOfAFolderMayBeLinks) {
  const TemporaryFolder folder;
  folder.write("blob", "a\n");
  for (const char* name : {"wiki.train", "wiki.valid", "wiki.test"})
    std::filesystem::create_symlink("blob", folder.path(name));
  EXPECT_EQ(read_text(folder.path()).train, "a\n");
}

TEST(CorpusText, AFolderWithoutOneSplitIsRefused) {
  const TemporaryFolder folder;
  folder.write("train.txt", "a");
  folder.write("test.txt", "b");
  EXPECT_EQ(error_of<c10::ValueError>([&] { read_text(folder.path()); }),
            "corpus: expected one file in " + folder.path() +
                " whose name contains \"valid\", got test.txt, train.txt. Name the files like wiki.train.tokens, "
                "wiki.valid.tokens and wiki.test.tokens, or give a single file.");
}

TEST(CorpusText, AFolderWithTwoFilesForASplitIsRefused) {
  const TemporaryFolder folder;
  for (const char* name : {"train.1", "train.2", "valid", "test"}) folder.write(name, "a");
  EXPECT_NE(error_of<c10::ValueError>([&] { read_text(folder.path()); }).find("\"train\", got train.1, train.2."),
            std::string::npos);
}

TEST(CorpusText, AFileIsCutInto90And5And5PercentAtEndsOfLines) {
  const TemporaryFolder folder;
  folder.write("book.txt", lines(0, 1000));
  const Text text = read_text(folder.path("book.txt"));
  EXPECT_EQ(text.train, lines(0, 901));
  EXPECT_EQ(text.valid, lines(901, 951));
  EXPECT_EQ(text.test, lines(951, 1000));
}

TEST(CorpusText, AFileOfOneLineIsAllTraining) {
  const TemporaryFolder folder;
  folder.write("one", "just one line");
  const Text text = read_text(folder.path("one"));
  EXPECT_EQ(text.train, "just one line");
  EXPECT_EQ(text.valid + text.test, "");
}

TEST(CorpusText, AMissingPathIsRefused) {
  EXPECT_EQ(error_of<c10::ValueError>([] { read_text("/no/such/place"); }),
            "corpus: expected an existing file or folder, got /no/such/place. Give a text file, or a folder with train, "
            "valid and test files, with --data.");
}

TEST(CorpusText, AnEmptyFileIsRefused) {
  const TemporaryFolder folder;
  folder.write("empty", "");
  EXPECT_NE(error_of<c10::ValueError>([&] { read_text(folder.path("empty")); }).find("is empty"), std::string::npos);
}

TEST(CorpusText, AllFilesAreCutEachInOrderOfNamesWithoutLinks) {
  const TemporaryFolder folder;
  folder.write("B", lines(0, 100));
  folder.write("A", lines(200, 300));
  std::filesystem::create_symlink("A", folder.path("0"));
  const Text text = read_all_files(folder.path());
  EXPECT_EQ(text.train, lines(200, 291) + lines(0, 91));
  EXPECT_EQ(text.valid, lines(291, 296) + lines(91, 96));
  EXPECT_EQ(text.test, lines(296, 300) + lines(96, 100));
}

TEST(CorpusText, TheDefaultIsTheLicencesOfDebian) {
  if (!std::filesystem::exists("/usr/share/common-licenses")) GTEST_SKIP() << "not on Debian";
  const Text text = read_text("");
  EXPECT_NE(text.train.find("GNU GENERAL PUBLIC LICENSE"), std::string::npos);
  const Vocabulary vocabulary(text.train);
  EXPECT_GT(vocabulary.encode(text.train).numel(), 20000);
  EXPECT_GT(vocabulary.encode(text.valid).numel(), 1000);
  EXPECT_GT(vocabulary.encode(text.test).numel(), 1000);
}

TEST(CorpusWords, AreSplitAsBasicEnglishDoes) {
  // What torchtext.data.utils.get_tokenizer("basic_english") returns.
  EXPECT_EQ(
      tokenize("Don't stop (me), now! Or: when? \"Quote\"; end.<br />Next"),
      (Words{"don", "'", "t", "stop", "(", "me", ")", ",", "now", "!", "or", "when", "?", "quote", "end", ".", "next"}));
  EXPECT_EQ(tokenize(" = Valkyria Chronicles III = \n"), (Words{"=", "valkyria", "chronicles", "iii", "="}));
  EXPECT_EQ(tokenize("a <unk> @-@ \t b\r\n"), (Words{"a", "<unk>", "@-@", "b"}));
  EXPECT_EQ(tokenize(" \t\r\n"), Words{});
  EXPECT_EQ(tokenize("\xc3\x84 b"), (Words{"\xc3\x84", "b"})) << "only ASCII is lowered";
}

TEST(CorpusVocabulary, OrdersByFrequencyThenByAlphabet) {
  const Vocabulary vocabulary("b c c <unk>\nB d a d <eos>\n");
  Words words;
  for (int64_t id = 0; id < vocabulary.size(); ++id) words.push_back(vocabulary.word(id));
  EXPECT_EQ(words, (Words{"<unk>", "<eos>", "b", "c", "d", "a"}));
}

TEST(CorpusVocabulary, LeavesOutRareWordsAndKeepsTheMostFrequent) {
  const std::string text = "a a a b b c\n";
  EXPECT_EQ(Vocabulary(text, {.min_frequency = 2}).size(), 4);
  EXPECT_EQ(Vocabulary(text, {.max_size = 3}).size(), 3);
  EXPECT_EQ(Vocabulary(text, {.max_size = 3}).word(2), "a");
  EXPECT_EQ(Vocabulary(text, {.max_size = 99}).size(), 5);
}

TEST(CorpusVocabulary, EncodesLinesWithTheirEnd) {
  const Vocabulary vocabulary("a a b\n");
  const at::Tensor ids = vocabulary.encode("b a\n\n  \nnew A");
  EXPECT_EQ(ids.scalar_type(), at::kLong);
  EXPECT_EQ(ids.dim(), 1);
  EXPECT_EQ(to_vector(ids), (std::vector<int64_t>{3, 2, 1, 0, 2, 1}));
  EXPECT_EQ(vocabulary.encode("").numel(), 0);
}

TEST(CorpusVocabulary, RefusesWhatCannotBe) {
  EXPECT_NE(error_of<c10::ValueError>([] { Vocabulary("\n\n"); }).find("got none"), std::string::npos);
  EXPECT_NE(error_of<c10::ValueError>([] { Vocabulary("a", {.min_frequency = 0}); }).find("got 0"), std::string::npos);
  EXPECT_NE(error_of<c10::ValueError>([] { Vocabulary("a", {.max_size = 2}); }).find("got 2"), std::string::npos);
  EXPECT_NE(error_of<c10::IndexError>([] { Vocabulary("a").word(3); }).find("[0, 3), got 3"), std::string::npos);
  EXPECT_NE(error_of<c10::IndexError>([] { Vocabulary("a").word(-1); }).find("got -1"), std::string::npos);
}

TEST(CorpusBatches, ColumnsAreEqualPartsOfTheText) {
  const at::Tensor columns = batchify(at::arange(11), 3);
  EXPECT_EQ(columns.sizes(), (std::vector<int64_t>{3, 3}));
  EXPECT_EQ(to_vector(columns), (std::vector<int64_t>{0, 3, 6, 1, 4, 7, 2, 5, 8}));
}

TEST(CorpusBatches, TargetIsTheNextTokenAndTheLastBatchIsShorter) {
  const at::Tensor columns = batchify(at::arange(12), 2);  // columns 0..5 and 6..11
  ASSERT_EQ(num_batches(columns, 3), 2);
  const Batch first = get_batch(columns, 0, 3);
  EXPECT_TRUE(at::equal(first.data, at::tensor({0, 1, 2, 6, 7, 8}, at::kLong).view({2, 3})));
  EXPECT_TRUE(at::equal(first.target, at::tensor({1, 2, 3, 7, 8, 9}, at::kLong).view({2, 3})));
  const Batch last = get_batch(columns, 1, 3);
  EXPECT_TRUE(at::equal(last.data, at::tensor({3, 4, 9, 10}, at::kLong).view({2, 2})));
  EXPECT_TRUE(at::equal(last.target, at::tensor({4, 5, 10, 11}, at::kLong).view({2, 2})));
  EXPECT_TRUE(first.data.is_contiguous() && first.target.is_contiguous());
}

TEST(CorpusBatches, EveryTokenIsATargetExactlyOnce) {
  const at::Tensor columns = batchify(at::arange(100), 4);
  for (const int64_t bptt : {1, 5, 7, 24, 25, 1000}) {
    std::vector<int64_t> targets;
    for (int64_t i = 0; i < num_batches(columns, bptt); ++i) {
      const Batch batch = get_batch(columns, i, bptt);
      EXPECT_LE(batch.data.size(1), bptt);
      EXPECT_TRUE(at::equal(batch.data.add(1), batch.target));
      for (const int64_t target : to_vector(batch.target)) targets.push_back(target);
    }
    std::vector<int64_t> expected;
    for (int64_t token = 0; token < 100; ++token) {
      if (token % 25 != 0) expected.push_back(token);
    }
    std::sort(targets.begin(), targets.end());
    EXPECT_EQ(targets, expected) << "bptt " << bptt;
  }
}

TEST(CorpusBatches, RefuseWhatDoesNotFit) {
  EXPECT_EQ(error_of<c10::ValueError>([] { batchify(at::arange(7), 4); }),
            "corpus: expected at least 8 tokens for batch_size=4, got 7. Give more text or a smaller --batch-size.");
  EXPECT_NE(error_of<c10::ValueError>([] { batchify(at::arange(7), 0); }).find("got 0"), std::string::npos);
  const at::Tensor columns = batchify(at::arange(12), 2);
  EXPECT_NE(error_of<c10::ValueError>([&] { num_batches(columns, 0); }).find("got 0"), std::string::npos);
  EXPECT_NE(error_of<c10::IndexError>([&] { get_batch(columns, 2, 3); }).find("[0, 2), got 2"), std::string::npos);
  EXPECT_NE(error_of<c10::IndexError>([&] { get_batch(columns, -1, 3); }).find("got -1"), std::string::npos);
}

}  // namespace
