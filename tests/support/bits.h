// Comparing tensors: bit for bit, or within a relative distance. GoogleTest expectations only.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

namespace smp::support {

/// Empty when both are undefined, or equal in dtype, sizes and every bit (NaNs and signed zeros too; strides may differ).
/// Otherwise a sentence with the number of differing elements and the largest difference.
std::string bit_difference(const at::Tensor& got, const at::Tensor& want);

/// max |got - want| / max |want|, in double; 0 for two undefined or empty tensors. NaN where either
/// has one. Both must have equal sizes.
double relative_difference(const at::Tensor& got, const at::Tensor& want);

void expect_bit_equal(const at::Tensor& got, const at::Tensor& want, const std::string& what);
void expect_bit_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want, const std::string& what);
void expect_bit_equal(const std::map<std::string, at::Tensor>& got, const std::map<std::string, at::Tensor>& want,
                      const std::string& what);

/// Equal sizes and dtype, and relative_difference <= relative.
void expect_close(const at::Tensor& got, const at::Tensor& want, double relative, const std::string& what);
void expect_close(const std::map<std::string, at::Tensor>& got, const std::map<std::string, at::Tensor>& want,
                  double relative, const std::string& what);

}  // namespace smp::support
