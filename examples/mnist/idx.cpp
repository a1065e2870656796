// Every number that a file claims is held against its size before memory is taken.
#include "examples/mnist/idx.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <vector>

namespace mnist {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBytesOfSize = 4;
constexpr int kUnsignedBytes = 0x08;
constexpr int64_t kNumClasses = 10;

class IdxFile {
 public:
  explicit IdxFile(const std::string& path) : path_(path) {
    const bool is_file = fs::is_regular_file(path);  // to open a FIFO would block
    if (is_file) file_.open(path, std::ios::binary);
    TORCH_CHECK_VALUE(is_file && file_.good(), "mnist: expected a file of IDX data, got ", path,
                      ", which does not exist or cannot be read. Give the folder of MNIST's four files with --data, or "
                      "write them with prepare_digits.py; the build does so where its Python has scikit-learn.");
    num_bytes_ = static_cast<int64_t>(fs::file_size(path));
  }

  /// The sizes of the tensor; what follows are the data.
  std::vector<int64_t> read_sizes(int64_t num_dimensions) {
    const auto magic = read<4>();
    TORCH_CHECK_VALUE(magic[0] != 0x1f || magic[1] != 0x8b, "mnist: expected a plain IDX file, got ", path_,
                      ", which is packed. Unpack it with gunzip.");
    TORCH_CHECK_VALUE(magic[0] == 0 && magic[1] == 0 && magic[2] == kUnsignedBytes, "mnist: expected ", path_,
                      " to start with the bytes 0 0 8 (IDX, unsigned bytes), got ", int{magic[0]}, " ", int{magic[1]}, " ",
                      int{magic[2]}, ". Give the files of MNIST, or write yours as prepare_digits.py does.");
    TORCH_CHECK_VALUE(magic[3] == num_dimensions, "mnist: expected ", num_dimensions, " dimensions in ", path_, ", got ",
                      int{magic[3]}, ". Images have three, labels have one: are the names exchanged?");
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < num_dimensions; ++i) sizes.push_back(read_size());
    check_length(sizes);
    return sizes;
  }

  void read_data(uint8_t* data, int64_t num_bytes) {
    file_.read(reinterpret_cast<char*>(data), static_cast<std::streamsize>(num_bytes));
    TORCH_CHECK_VALUE(file_.good(), "mnist: expected ", num_bytes, " bytes of data in ", path_,
                      ", got an error of the file system.");
  }

 private:
  template <size_t num_bytes>
  std::array<uint8_t, num_bytes> read() {
    std::array<uint8_t, num_bytes> bytes{};
    file_.read(reinterpret_cast<char*>(bytes.data()), num_bytes);
    TORCH_CHECK_VALUE(file_.good(), "mnist: expected the head of an IDX file in ", path_, ", got a file of ", num_bytes_,
                      " bytes. It is cut short: fetch it again.");
    return bytes;
  }

  int64_t read_size() {
    int64_t size = 0;
    for (const uint8_t byte : read<kBytesOfSize>()) size = size * 256 + byte;
    TORCH_CHECK_VALUE(size > 0, "mnist: expected sizes above 0 in ", path_, ", got an empty dimension.");
    return size;
  }

  // Divides instead of multiplying, since three sizes of four bytes each overflow.
  void check_length(const std::vector<int64_t>& sizes) const {
    const int64_t got = num_bytes_ - kBytesOfSize * (1 + static_cast<int64_t>(sizes.size()));
    int64_t rest = got;
    bool is_whole = true;
    for (const int64_t size : sizes) {
      is_whole = is_whole && rest % size == 0;
      rest /= size;
    }
    TORCH_CHECK_VALUE(is_whole && rest == 1, "mnist: expected data of sizes ", at::IntArrayRef(sizes), " in ", path_,
                      ", got ", got, " bytes of data. The file is cut short or too long: fetch it again.");
  }

  std::string path_;
  std::ifstream file_;
  int64_t num_bytes_ = 0;
};

// The one of the two usual names that is there; the first if none is.
std::string path_in(const std::string& folder, const std::string& name) {
  std::string with_dot = name;
  with_dot[name.find("-idx")] = '.';
  const fs::path usual = fs::path(folder) / name, dotted = fs::path(folder) / with_dot;
  return fs::exists(dotted) && !fs::exists(usual) ? dotted : usual;
}

Images read_images(const std::string& folder, const std::string& split) {
  const std::string path = path_in(folder, split + "-labels-idx1-ubyte");
  Images images{read_idx(path_in(folder, split + "-images-idx3-ubyte"), 3), read_idx(path, 1).to(at::kLong)};
  TORCH_CHECK_VALUE(images.labels.size(0) == images.size(), "mnist: expected a label for each of ", images.size(),
                    " images, got ", images.labels.size(0), " in ", path, ". The files are of different sets.");
  const auto largest = images.labels.max().item<int64_t>();
  TORCH_CHECK_VALUE(largest < kNumClasses, "mnist: expected labels from 0 to 9 in ", path, ", got ", largest, ".");
  return images;
}

}  // namespace

at::Tensor read_idx(const std::string& path, int64_t num_dimensions) {
  IdxFile file(path);
  at::Tensor tensor = at::empty(file.read_sizes(num_dimensions), at::kByte);
  file.read_data(tensor.mutable_data_ptr<uint8_t>(), tensor.numel());
  return tensor;
}

Digits read_digits(const std::string& folder) {
  TORCH_CHECK_VALUE(fs::is_directory(folder), "mnist: expected a folder with IDX files, got ", folder,
                    ". Give the folder of MNIST's four files with --data, or write them with prepare_digits.py; the build "
                    "does so where its Python has scikit-learn.");
  Digits digits{read_images(folder, "train"), read_images(folder, "t10k")};
  const auto train = digits.train.pixels.sizes().slice(1), test = digits.test.pixels.sizes().slice(1);
  TORCH_CHECK_VALUE(train == test, "mnist: expected images of one size in ", folder, ", got ", train, " for training and ",
                    test, " for the test. The files are of different sets.");
  return digits;
}

}  // namespace mnist
