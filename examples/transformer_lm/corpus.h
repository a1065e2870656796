// The text that the language model learns from: reading, words to numbers, batches. No randomness.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace transformer_lm {

struct Text {
  std::string train, valid, test;
};

/// Reads a corpus from
///   - a folder with one file each whose name contains "train", "valid" and "test" (WikiText's
///   form),
///   - a file: its first 90 % of bytes train, then 5 % valid and 5 % test, cut at ends of lines,
///   - nothing (""): the licence texts that every Debian carries, each file cut like that.
/// Throws c10::ValueError when the path does not exist or has another form.
Text read_text(const std::string& path);

/// Reads every regular file of `folder` (symbolic links left out) in order of names; each is cut as above.
Text read_all_files(const std::string& folder);

/// Lower-case words and punctuation marks of a line, as torchtext's basic_english splits them.
std::vector<std::string> tokenize(std::string_view line);

struct VocabularyOptions {
  int64_t min_frequency = 1;  // rarer words are <unk>; at least 1
  int64_t max_size = 0;       // most frequent words kept, <unk> and <eos> included; 0 = all
};

/// The words of the training text, by falling frequency (equal ones in alphabetical order).
///
///   Vocabulary vocabulary(text.train, {.min_frequency = 2});
///   at::Tensor ids = vocabulary.encode(text.valid);   // [tokens], int64
class Vocabulary {
 public:
  static constexpr int64_t kUnknown = 0;    // <unk>: every word that is not in the vocabulary
  static constexpr int64_t kEndOfLine = 1;  // <eos>: follows every line that has words

  /// Throws c10::ValueError when the text has no word or an option is out of range.
  explicit Vocabulary(std::string_view training_text, const VocabularyOptions& options = {});

  int64_t size() const { return static_cast<int64_t>(words_.size()); }

  /// Throws c10::IndexError outside 0 <= id < size().
  const std::string& word(int64_t id) const;

  /// The words of `text` as numbers, line by line: [tokens], int64 on the CPU. Empty lines give nothing.
  at::Tensor encode(std::string_view text) const;

 private:
  std::vector<std::string> words_;
  std::unordered_map<std::string, int64_t> ids_;
};

/// Lays `ids` [tokens] out as columns [tokens / batch_size, batch_size]: column b is the b-th of
/// batch_size equal parts of the text; what is left over at its end is dropped (PyTorch's word
/// language model tutorial). Throws c10::ValueError when a column would have fewer than two tokens.
at::Tensor batchify(const at::Tensor& ids, int64_t batch_size);

/// Number of batches of at most `bptt` tokens per column in what batchify returned.
int64_t num_batches(const at::Tensor& columns, int64_t bptt);

struct Batch {
  at::Tensor data;    // [batch_size, T], int64, contiguous: dimension 0 is the one that microbatches split
  at::Tensor target;  // [batch_size, T], the token after each one of data
};

/// Batch i, 0 <= i < num_batches; T = bptt, less in the last one. Throws c10::IndexError otherwise.
Batch get_batch(const at::Tensor& columns, int64_t i, int64_t bptt);

}  // namespace transformer_lm
