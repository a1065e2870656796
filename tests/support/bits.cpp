// Comparing tensors byte by byte, and in double where a distance is asked for.
#include "tests/support/bits.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/max.h>
#include <ATen/ops/sub.h>
#include <gtest/gtest.h>

#include <cstring>
#include <sstream>

namespace smp::support {
namespace {

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  std::ostringstream text;
  text << tensor.scalar_type() << " " << tensor.sizes();
  return text.str();
}

/// Empty, or why the two cannot be compared element by element.
std::string shape_difference(const at::Tensor& got, const at::Tensor& want) {
  bool same = got.defined() == want.defined();
  if (same && got.defined()) {
    same = got.scalar_type() == want.scalar_type() && got.sizes() == want.sizes();
  }
  return same ? "" : "expected " + describe(want) + ", got " + describe(got);
}

template <class Compare>
void for_each_name(const std::map<std::string, at::Tensor>& got, const std::map<std::string, at::Tensor>& want,
                   const std::string& what, const Compare& compare) {
  for (const auto& [name, tensor] : want) {
    auto found = got.find(name);
    if (found == got.end()) {
      ADD_FAILURE() << what << ": expected " << name << ", got no such name";
    } else {
      compare(found->second, tensor, what + " " + name);
    }
  }
  for (const auto& [name, tensor] : got) {
    if (want.count(name) == 0) ADD_FAILURE() << what << ": got " << name << ", which is unexpected";
  }
}

}  // namespace

double relative_difference(const at::Tensor& got, const at::Tensor& want) {
  if (!got.defined() || !want.defined() || want.numel() == 0) return 0.0;
  auto a = got.detach().cpu().to(at::kDouble), b = want.detach().cpu().to(at::kDouble);
  auto distance = a.sub(b).abs().max().item<double>();
  auto scale = b.abs().max().item<double>();
  return distance == 0.0 ? 0.0 : distance / scale;
}

std::string bit_difference(const at::Tensor& got, const at::Tensor& want) {
  auto shapes = shape_difference(got, want);
  if (!shapes.empty() || !want.defined()) return shapes;
  auto a = got.detach().cpu().contiguous(), b = want.detach().cpu().contiguous();
  const auto* left = static_cast<const char*>(a.const_data_ptr());
  const auto* right = static_cast<const char*>(b.const_data_ptr());
  const size_t size = b.element_size();
  int64_t differing = 0, first = -1;
  for (int64_t i = 0; i < b.numel(); ++i) {
    if (std::memcmp(left + i * size, right + i * size, size) == 0) continue;
    if (differing++ == 0) first = i;
  }
  if (differing == 0) return "";
  std::ostringstream text;
  text.precision(9);
  text << differing << " of " << b.numel() << " elements of " << describe(want) << " differ; the first at flat index "
       << first << ": expected " << b.view({-1})[first].item().toDouble() << ", got "
       << a.view({-1})[first].item().toDouble() << "; relative difference " << relative_difference(a, b);
  return text.str();
}

void expect_bit_equal(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  auto difference = bit_difference(got, want);
  if (!difference.empty()) ADD_FAILURE() << what << ": " << difference;
}

void expect_bit_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want, const std::string& what) {
  EXPECT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    expect_bit_equal(got[i], want[i], what + "[" + std::to_string(i) + "]");
  }
}

void expect_bit_equal(const std::map<std::string, at::Tensor>& got, const std::map<std::string, at::Tensor>& want,
                      const std::string& what) {
  for_each_name(got, want, what,
                [](const auto& a, const auto& b, const std::string& name) { expect_bit_equal(a, b, name); });
}

void expect_close(const at::Tensor& got, const at::Tensor& want, double relative, const std::string& what) {
  auto shapes = shape_difference(got, want);
  if (!shapes.empty()) {
    ADD_FAILURE() << what << ": " << shapes;
    return;
  }
  auto difference = relative_difference(got, want);
  // Written so that a NaN fails.
  if (!(difference <= relative)) {
    ADD_FAILURE() << what << ": relative difference " << difference << ", expected <= " << relative;
  }
}

void expect_close(const std::map<std::string, at::Tensor>& got, const std::map<std::string, at::Tensor>& want,
                  double relative, const std::string& what) {
  for_each_name(got, want, what,
                [=](const auto& a, const auto& b, const std::string& name) { expect_close(a, b, relative, name); });
}

}  // namespace smp::support
