// Autocast to bfloat16, as a training loop writes it around a part of itself.
#pragma once

#include <ATen/autocast_mode.h>

namespace smp::support {

class Autocast {
 public:
  explicit Autocast(at::DeviceType device, bool enabled = true)
      : device_(device), was_(at::autocast::is_autocast_enabled(device)) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(device_, enabled);
    at::autocast::set_autocast_dtype(device_, at::kBFloat16);
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, was_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType device_;
  bool was_;
};

}  // namespace smp::support
