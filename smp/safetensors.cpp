// A file is: length of the header (8 bytes, little endian), header (JSON: name -> dtype, shape, data_offsets), data.
#include "smp/safetensors.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <boost/json/serialize.hpp>
#include <optional>
#include <set>

#include "partitioner/graph/tensor_bytes.h"
#include "runtime/device/device.h"
#include "smp/engine/files/durable_file.h"
#include "smp/engine/files/input_file.h"
#include "smp/engine/files/json_object.h"

namespace smp {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors are little endian");

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // of the format
constexpr const char* kMetadata = "__metadata__";

constexpr std::pair<const char*, c10::ScalarType> kDtypes[] = {
    {"BOOL", c10::ScalarType::Bool},  {"U8", c10::ScalarType::Byte},       {"I8", c10::ScalarType::Char},
    {"U16", c10::ScalarType::UInt16}, {"I16", c10::ScalarType::Short},     {"U32", c10::ScalarType::UInt32},
    {"I32", c10::ScalarType::Int},    {"U64", c10::ScalarType::UInt64},    {"I64", c10::ScalarType::Long},
    {"F16", c10::ScalarType::Half},   {"BF16", c10::ScalarType::BFloat16}, {"F32", c10::ScalarType::Float},
    {"F64", c10::ScalarType::Double}};

const char* name_of(c10::ScalarType dtype) {
  for (const auto& [name, type] : kDtypes) {
    if (type == dtype) return name;
  }
  return nullptr;
}

/// One tensor's row of the header.
struct Row {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<int64_t> sizes{};
  uint64_t begin = 0, end = 0;  // of its data, in bytes after the header
};

void check_writable(const Safetensors& file) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : file.tensors) {
    TORCH_CHECK_VALUE(
        tensor.defined() && runtime::is_on_host(tensor) && tensor.layout() == at::kStrided && name_of(tensor.scalar_type()),
        "write_safetensors: expected a dense CPU tensor of a type that the format has, got ",
        tensor.defined() ? tensor.toString() : "an undefined one", " for '", name, "'.");
    TORCH_CHECK_VALUE(name != kMetadata && names.insert(name).second, "write_safetensors: expected names that come once, ",
                      "and not ", kMetadata, ", got '", name, "'.");
  }
}

std::string header_of(const Safetensors& file) {
  boost::json::object header;
  if (!file.metadata.empty()) {
    boost::json::object metadata;
    for (const auto& [key, value] : file.metadata) metadata[key] = value;
    header[kMetadata] = std::move(metadata);
  }
  uint64_t begin = 0;
  for (const auto& [name, tensor] : file.tensors) {
    const uint64_t end = begin + static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
    const boost::json::array shape(tensor.sizes().begin(), tensor.sizes().end());
    header[name] = {{"dtype", name_of(tensor.scalar_type())}, {"shape", shape}, {"data_offsets", {begin, end}}};
    begin = end;
  }
  std::string text = boost::json::serialize(header);
  text.append((8 - text.size() % 8) % 8, ' ');  // data start at a multiple of 8
  return text;
}

/// Reads a file's header; every complaint names the file.
class HeaderReader {
 public:
  HeaderReader(const std::string& path, uint64_t data_bytes) : path_(path), data_bytes_(data_bytes) {}

  std::vector<Row> read(std::string_view text, std::map<std::string, std::string>& metadata) const {
    const engine::JsonObject header = engine::parse_json_object(text);
    require(!header.problem, "a header of JSON", header.problem.value_or(""));
    require(header.repeated_keys.empty(), "each name once",
            header.repeated_keys.empty() ? "" : "'" + header.repeated_keys.front() + "' twice");
    std::vector<Row> rows;
    for (const auto& member : header.members) {
      member.key() == kMetadata ? read_metadata(member.value(), metadata)
                                : rows.push_back(read_row(std::string(member.key()), member.value()));
    }
    // Tensors without numbers are at the same place, and the checksum of a save goes by the order in which they were
    // written.
    std::stable_sort(rows.begin(), rows.end(),
                     [](const Row& a, const Row& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
    check_places(rows);
    return rows;
  }

  void require(bool holds, const std::string& expected, const std::string& got) const {
    TORCH_CHECK_VALUE(holds, "read_safetensors: '", path_, "': expected ", expected, ", got ", got,
                      ". The file is damaged or no safetensors file.");
  }

 private:
  void read_metadata(const boost::json::value& value, std::map<std::string, std::string>& metadata) const {
    require(value.is_object(), "an object of texts as metadata", "another type");
    for (const auto& item : value.get_object()) {
      require(item.value().is_string(), "texts as metadata", "another type for '" + std::string(item.key()) + "'");
      metadata[item.key()] = std::string(item.value().get_string());
    }
  }

  const boost::json::value& member(const boost::json::object& row, const char* key, const std::string& name) const {
    const boost::json::value* found = row.if_contains(key);
    require(found != nullptr, "'" + name + "' with dtype, shape and data_offsets", std::string("no ") + key);
    return *found;
  }

  std::vector<uint64_t> numbers(const boost::json::value& value, const std::string& what) const {
    require(value.is_array(), what + " as a list of numbers", "another type");
    std::vector<uint64_t> read;
    for (const boost::json::value& item : value.get_array()) {
      require(item.is_int64() && item.get_int64() >= 0, what + " of numbers from 0 to 2^63 - 1",
              boost::json::serialize(item));
      read.push_back(static_cast<uint64_t>(item.get_int64()));
    }
    return read;
  }

  Row read_row(const std::string& name, const boost::json::value& value) const {
    require(value.is_object(), "an object for '" + name + "'", "another type");
    const boost::json::object& object = value.get_object();
    Row row{.name = name};
    const boost::json::value& dtype = member(object, "dtype", name);
    for (const auto& [known, type] : kDtypes) {
      if (dtype.is_string() && dtype.get_string() == known) row.dtype = type;
    }
    require(row.dtype != c10::ScalarType::Undefined, "a type that torch has for '" + name + "'",
            boost::json::serialize(dtype));
    for (const uint64_t size : numbers(member(object, "shape", name), "the shape of '" + name + "'")) {
      row.sizes.push_back(static_cast<int64_t>(size));
    }
    const std::optional<int64_t> num_bytes = partitioner::dense_bytes(row.sizes, row.dtype);
    const auto offsets = numbers(member(object, "data_offsets", name), "the data_offsets of '" + name + "'");
    require(offsets.size() == 2 && offsets[0] <= offsets[1] && offsets[1] <= data_bytes_,
            "data of '" + name + "' within the file's " + std::to_string(data_bytes_) + " bytes",
            boost::json::serialize(object.at("data_offsets")));
    row.begin = offsets[0], row.end = offsets[1];
    require(num_bytes && row.end - row.begin == static_cast<uint64_t>(*num_bytes),
            "as many bytes for '" + name + "' as its shape has", std::to_string(row.end - row.begin) + " bytes");
    return row;
  }

  // The format wants every byte to belong to one tensor.
  void check_places(const std::vector<Row>& rows) const {
    uint64_t end = 0;
    for (const Row& row : rows) {
      require(row.begin == end, "data without gaps and overlaps",
              "'" + row.name + "' at byte " + std::to_string(row.begin) + " after " + std::to_string(end));
      end = row.end;
    }
    require(end == data_bytes_, std::to_string(end) + " bytes of data", std::to_string(data_bytes_));
  }

  const std::string& path_;
  uint64_t data_bytes_;
};

}  // namespace

void write_safetensors(const std::string& path, const Safetensors& file) {
  check_writable(file);
  const std::string header = header_of(file);
  TORCH_CHECK_VALUE(header.size() <= kMaxHeaderBytes, "write_safetensors: expected a header of at most 100 MB, got ",
                    header.size(), " bytes. Write fewer or shorter names and texts.");
  const auto header_bytes = static_cast<uint64_t>(header.size());
  engine::DurableFile out(path);
  out.write(&header_bytes, sizeof header_bytes);
  out.write(header.data(), header.size());
  for (const auto& [name, tensor] : file.tensors) {
    const at::Tensor data = tensor.detach().resolve_conj().resolve_neg().contiguous();
    out.write(runtime::data_of(data), data.nbytes());
  }
  out.commit();
}

Safetensors read_safetensors(const std::string& path) {
  engine::InputFile in(path, "read_safetensors: expected a file that can be read");
  const uint64_t file_bytes = in.num_bytes();
  const HeaderReader sizes(path, 0);
  uint64_t header_bytes = 0;
  sizes.require(file_bytes >= sizeof header_bytes, "at least 8 bytes", std::to_string(file_bytes));
  in.read(&header_bytes, sizeof header_bytes);
  sizes.require(header_bytes <= std::min(kMaxHeaderBytes, file_bytes - sizeof header_bytes),
                "a header that fits into the file's " + std::to_string(file_bytes) + " bytes",
                std::to_string(header_bytes) + " bytes");
  std::string header(header_bytes, ' ');
  in.read(header.data(), header_bytes);
  Safetensors file;
  const HeaderReader reader(path, file_bytes - sizeof header_bytes - header_bytes);
  for (const Row& row : reader.read(header, file.metadata)) {
    at::Tensor tensor = runtime::host().empty(row.sizes, row.dtype);
    if (tensor.nbytes() > 0) in.read(runtime::memory_of(tensor).data, tensor.nbytes());
    file.tensors.emplace_back(row.name, std::move(tensor));
  }
  return file;
}

}  // namespace smp
