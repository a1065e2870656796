// safetensors files: written whole or not at all, read without believing them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "smp/smp.h"
#include "tests/support/bits.h"
#include "tests/support/messages.h"
#include "tests/unit/examples/temporary_folder.h"

namespace smp {
namespace {

using support::contains;
using support::message_of;

class SafetensorsFile : public testing::Test {
 protected:
  std::string path(const std::string& name = "a.safetensors") const { return folder_.path(name); }

  std::string folder() const { return folder_.path(); }

  void write_bytes(const std::string& bytes) const { std::ofstream(path(), std::ios::binary) << bytes; }
  std::string bytes() const {
    std::ostringstream text;
    text << std::ifstream(path(), std::ios::binary).rdbuf();
    return text.str();
  }
  void write_header(const std::string& header, size_t data_bytes) const {
    const uint64_t length = header.size();
    std::string bytes(sizeof length, ' ');
    std::memcpy(bytes.data(), &length, sizeof length);
    write_bytes(bytes + header + std::string(data_bytes, 'x'));
  }
  void expect_refused(const std::string& header, size_t data_bytes, const std::string& part) const {
    write_header(header, data_bytes);
    const std::string text = message_of<c10::ValueError>([&] { read_safetensors(path()); });
    EXPECT_TRUE(contains(text, part) && contains(text, path())) << header << "\n" << text;
  }

 private:
  TemporaryFolder folder_;
};

TEST_F(SafetensorsFile, KeepsEveryTypeShapeAndBit) {
  Safetensors file{.tensors = {}, .metadata = {{"epoch", "3"}, {"text", "\"quoted\" \n äöü"}}};
  const at::Tensor numbers = torch::arange(24, at::kDouble).reshape({2, 3, 4}) / 7;
  for (const auto dtype : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
                           at::kFloat, at::kDouble, at::kUInt16, at::kUInt32, at::kUInt64}) {
    file.tensors.emplace_back(toString(dtype), numbers.to(dtype));
  }
  file.tensors.emplace_back("scalar", torch::scalar_tensor(0.1));
  file.tensors.emplace_back("empty", torch::empty({0, 3}));
  file.tensors.emplace_back("transposed", numbers.transpose(0, 2));
  write_safetensors(path(), file);
  const Safetensors read = read_safetensors(path());
  EXPECT_EQ(read.metadata, file.metadata);
  ASSERT_EQ(read.tensors.size(), file.tensors.size());
  std::map<std::string, at::Tensor> got(read.tensors.begin(), read.tensors.end());
  for (const auto& [name, tensor] : file.tensors) {
    EXPECT_EQ(got.at(name).scalar_type(), tensor.scalar_type());
    ASSERT_TRUE(got.at(name).sizes().equals(tensor.sizes())) << name;
    if (tensor.scalar_type() < at::kUInt16) support::expect_bit_equal(got.at(name), tensor, name);
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder()), {}), 1);
}

TEST_F(SafetensorsFile, KeepsTheOrderOfTensorsWithoutNumbers) {
  Safetensors file{.tensors = {{"first", torch::ones({3})}}, .metadata = {}};
  for (int i = 0; i < 40; ++i) file.tensors.emplace_back("empty " + std::to_string(i), torch::empty({0, 3}));
  write_safetensors(path(), file);
  const Safetensors read = read_safetensors(path());
  ASSERT_EQ(read.tensors.size(), file.tensors.size());
  std::vector<std::string> got, want;
  for (const auto& [name, tensor] : read.tensors) got.push_back(name);
  for (const auto& [name, tensor] : file.tensors) want.push_back(name);
  EXPECT_EQ(got, want);
}

TEST_F(SafetensorsFile, RefusesWhatItCannotWriteAndLeavesTheOldFile) {
  write_safetensors(path(), {.tensors = {{"a", torch::ones({2})}}, .metadata = {}});
  const std::string before = bytes();
  EXPECT_THROW(write_safetensors(path(), {.tensors = {{"a", at::Tensor()}}, .metadata = {}}), c10::ValueError);
  EXPECT_THROW(write_safetensors(path(), {.tensors = {{"a", torch::ones({2}, at::kComplexFloat)}}, .metadata = {}}),
               c10::ValueError);
  EXPECT_THROW(write_safetensors(path(), {.tensors = {{"a", torch::ones(1)}, {"a", torch::ones(1)}}, .metadata = {}}),
               c10::ValueError);
  EXPECT_THROW(write_safetensors(path(), {.tensors = {{"__metadata__", torch::ones(1)}}, .metadata = {}}), c10::ValueError);
  EXPECT_EQ(bytes(), before);
  const std::string text = message_of([&] { write_safetensors(path("no/folder"), {}); });
  EXPECT_TRUE(contains(text, "No such file or directory") && contains(text, "no/folder")) << text;
  EXPECT_TRUE(contains(message_of([&] { read_safetensors(path("none")); }), "No such file"));
}

TEST_F(SafetensorsFile, RefusesHeadersThatLie) {
  const auto row = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "{\"a\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}";
  };
  write_header(row("F32", "[2]", "[0,8]"), 8);
  EXPECT_EQ(read_safetensors(path()).tensors.size(), 1);
  expect_refused(row("F32", "[2]", "[0,8]"), 7, "within the file's 7 bytes");
  expect_refused(row("F32", "[2]", "[0,8]"), 9, "8 bytes of data, got 9");
  expect_refused(row("F32", "[3]", "[0,8]"), 8, "as many bytes");
  expect_refused(row("F32", "[-2]", "[0,8]"), 8, "numbers from 0");
  expect_refused(row("F32", "[2.0]", "[0,8]"), 8, "numbers from 0");
  expect_refused(row("F32", "2", "[0,8]"), 8, "list of numbers");
  expect_refused(row("F33", "[2]", "[0,8]"), 8, "a type that torch has");
  expect_refused(row("F32", "[2]", "[8,0]"), 8, "within the file's");
  expect_refused(row("F32", "[2]", "[0,8,16]"), 8, "within the file's");
  expect_refused(row("F32", "[4611686018427387904,4]", "[0,8]"), 8, "as many bytes");
  expect_refused(row("F32", "[9223372036854775807,9223372036854775807]", "[0,4]"), 4, "as many bytes");
  expect_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "no data_offsets");
  expect_refused("{\"a\":7}", 0, "an object for 'a'");
  expect_refused("{\"__metadata__\":{\"a\":1}}", 0, "texts as metadata");
  expect_refused("[1]", 0, "a header of JSON");
  expect_refused("{} x", 0, "a header of JSON");
  expect_refused("{", 0, "a header of JSON");
  const std::string one = "{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}";
  expect_refused("{\"a\":" + one + ",\"b\":" + one + "}", 2, "without gaps and overlaps");
  expect_refused("{\"a\":" + one + ",\"a\":" + one + "}", 2, "each name once");
  expect_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}", 3, "without gaps");
  write_bytes("short");
  EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { read_safetensors(path()); }), "at least 8 bytes"));
  write_bytes(std::string(8, '\xff') + "{}");
  EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { read_safetensors(path()); }), "a header that fits"));
}

TEST_F(SafetensorsFile, SurvivesEveryFlippedBitOfTheHeader) {
  write_safetensors(path(),
                    {.tensors = {{"ab", torch::ones({2, 3})}, {"c", torch::ones({}, at::kLong)}}, .metadata = {{"k", "v"}}});
  const std::string good = bytes();
  const size_t header_end = good.size() - 32;
  for (size_t bit = 0; bit < header_end * 8; ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    write_bytes(bad);
    try {
      read_safetensors(path());  // names may change, sizes may not
    } catch (const c10::ValueError&) {
    }
  }
  for (size_t length = 0; length < good.size(); ++length) {
    write_bytes(good.substr(0, length));
    EXPECT_THROW(read_safetensors(path()), c10::ValueError) << length;
  }
}

}  // namespace
}  // namespace smp
