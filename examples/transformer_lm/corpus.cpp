// Reading text, building the vocabulary, cutting batches.
#include "examples/transformer_lm/corpus.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace transformer_lm {
namespace {

namespace fs = std::filesystem;

constexpr const char* kDefaultFolder = "/usr/share/common-licenses";
constexpr const char* kSpecialWords[] = {"<unk>", "<eos>"};  // in the order of their ids

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  TORCH_CHECK_VALUE(file.good() && text.good(), "corpus: expected a readable text file, got ", path.string(),
                    ", which cannot be read or is empty. Check its permissions and size.");
  return text.str();
}

// The end of the line that holds byte `position`.
size_t end_of_line(std::string_view text, size_t position) {
  const size_t newline = text.find('\n', position);
  return newline == std::string_view::npos ? text.size() : newline + 1;
}

void cut_into(Text& splits, std::string_view text) {
  const size_t train = end_of_line(text, text.size() / 10 * 9);
  const size_t valid = end_of_line(text, std::max(train, text.size() / 20 * 19));
  splits.train += text.substr(0, train);
  splits.valid += text.substr(train, valid - train);
  splits.test += text.substr(valid);
}

enum class Links { kFollow, kSkip };

std::vector<fs::path> regular_files(const fs::path& folder, Links links) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const bool is_hidden = entry.path().filename().string().starts_with('.');
    const bool is_skipped = is_hidden || (links == Links::kSkip && entry.is_symlink());
    if (entry.is_regular_file() && !is_skipped) files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

std::string names_of(const std::vector<fs::path>& files) {
  std::string names;
  for (const auto& file : files) {
    names.append(names.empty() ? "" : ", ").append(file.filename().string());
  }
  return names.empty() ? "no files" : names;
}

// The file of `files` whose name contains `split`.
fs::path file_of(const std::vector<fs::path>& files, const std::string& folder, const char* split) {
  std::vector<fs::path> matches;
  for (const auto& file : files) {
    if (file.filename().string().find(split) != std::string::npos) matches.push_back(file);
  }
  TORCH_CHECK_VALUE(
      matches.size() == 1, "corpus: expected one file in ", folder, " whose name contains \"", split, "\", got ",
      names_of(matches.empty() ? files : matches),
      ". Name the files like wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, or give a single file.");
  return matches.front();
}

// Calls use(line) for every line that has words.
template <typename Use>
void for_each_line(std::string_view text, Use use) {
  while (!text.empty()) {
    const size_t end = end_of_line(text, 0);
    const auto words = tokenize(text.substr(0, end));
    if (!words.empty()) use(words);
    text.remove_prefix(end);
  }
}

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

}  // namespace

Text read_all_files(const std::string& folder) {
  Text splits;
  for (const auto& file : regular_files(folder, Links::kSkip)) cut_into(splits, read_file(file));
  return splits;
}

Text read_text(const std::string& path) {
  const fs::path source = path.empty() ? kDefaultFolder : path;
  TORCH_CHECK_VALUE(fs::exists(source), "corpus: expected an existing file or folder, got ", source.string(),
                    ". Give a text file, or a folder with train, valid and test", " files, with --data.");
  if (path.empty()) return read_all_files(kDefaultFolder);
  if (fs::is_directory(source)) {
    const auto files = regular_files(source, Links::kFollow);
    return {read_file(file_of(files, path, "train")), read_file(file_of(files, path, "valid")),
            read_file(file_of(files, path, "test"))};
  }
  Text splits;
  cut_into(splits, read_file(source));
  return splits;
}

// torchtext: ' . , ( ) ! ? stand alone, " vanishes, : ; and <br /> separate.
std::vector<std::string> tokenize(std::string_view line) {
  std::vector<std::string> words;
  std::string word;
  const auto end_word = [&] {
    if (!word.empty()) words.push_back(std::move(word));
    word.clear();
  };
  constexpr std::string_view kLineBreak = "<br />";
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (line.substr(i).starts_with(kLineBreak)) {
      end_word();
      i += kLineBreak.size() - 1;
    } else if (is_space(c) || c == ':' || c == ';') {
      end_word();
    } else if (std::string_view("'.,()!?").find(c) != std::string_view::npos) {
      end_word();
      words.emplace_back(1, c);
    } else if (c != '"') {
      word += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    }
  }
  end_word();
  return words;
}

Vocabulary::Vocabulary(std::string_view training_text, const VocabularyOptions& options) {
  TORCH_CHECK_VALUE(options.min_frequency >= 1, "corpus: expected min_frequency of 1 or more, got ", options.min_frequency,
                    ".");
  constexpr int64_t kNumSpecial = std::size(kSpecialWords);
  TORCH_CHECK_VALUE(options.max_size == 0 || options.max_size > kNumSpecial, "corpus: expected max_size above ", kNumSpecial,
                    " (<unk>, <eos>) or 0, got ", options.max_size, ".");
  std::unordered_map<std::string, int64_t> frequency;
  for_each_line(training_text, [&](const std::vector<std::string>& words) {
    for (const auto& word : words) ++frequency[word];
  });
  TORCH_CHECK_VALUE(!frequency.empty(), "corpus: expected words in the training text, got none. Give more text.");
  for (const char* special : kSpecialWords) frequency.erase(special);

  std::vector<std::pair<std::string, int64_t>> ranking;
  for (const auto& entry : frequency) {
    if (entry.second >= options.min_frequency) ranking.push_back(entry);
  }
  std::ranges::sort(
      ranking, [](const auto& a, const auto& b) { return a.second != b.second ? a.second > b.second : a.first < b.first; });
  words_.assign(std::begin(kSpecialWords), std::end(kSpecialWords));
  for (auto& entry : ranking) {
    if (options.max_size != 0 && size() == options.max_size) break;
    words_.push_back(std::move(entry.first));
  }
  for (int64_t id = 0; id < size(); ++id) ids_.emplace(words_[static_cast<size_t>(id)], id);
}

const std::string& Vocabulary::word(int64_t id) const {
  TORCH_CHECK_INDEX(id >= 0 && id < size(), "corpus: expected a word number in [0, ", size(), "), got ", id, ".");
  return words_[static_cast<size_t>(id)];
}

at::Tensor Vocabulary::encode(std::string_view text) const {
  std::vector<int64_t> ids;
  for_each_line(text, [&](const std::vector<std::string>& words) {
    for (const auto& word : words) {
      const auto known = ids_.find(word);
      ids.push_back(known == ids_.end() ? kUnknown : known->second);
    }
    ids.push_back(kEndOfLine);
  });
  at::Tensor tensor = at::empty({static_cast<int64_t>(ids.size())}, at::kLong);
  std::ranges::copy(ids, tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

at::Tensor batchify(const at::Tensor& ids, int64_t batch_size) {
  TORCH_CHECK_VALUE(batch_size >= 1, "corpus: expected a batch size of 1 or more, got ", batch_size, ".");
  const int64_t rows = ids.numel() / batch_size;
  TORCH_CHECK_VALUE(rows >= 2, "corpus: expected at least ", 2 * batch_size, " tokens for batch_size=", batch_size, ", got ",
                    ids.numel(), ". Give more text or a smaller --batch-size.");
  return ids.slice(0, 0, rows * batch_size).view({batch_size, rows}).t().contiguous();
}

int64_t num_batches(const at::Tensor& columns, int64_t bptt) {
  TORCH_CHECK_VALUE(bptt >= 1, "corpus: expected bptt of 1 or more, got ", bptt, ".");
  return (columns.size(0) - 1 + bptt - 1) / bptt;
}

Batch get_batch(const at::Tensor& columns, int64_t i, int64_t bptt) {
  const int64_t count = num_batches(columns, bptt);
  TORCH_CHECK_INDEX(i >= 0 && i < count, "corpus: expected a batch number in [0, ", count, "), got ", i, ".");
  const int64_t first = i * bptt;
  const int64_t last = std::min(first + bptt, columns.size(0) - 1);
  return {columns.slice(0, first, last).t().contiguous(), columns.slice(0, first + 1, last + 1).t().contiguous()};
}

}  // namespace transformer_lm
