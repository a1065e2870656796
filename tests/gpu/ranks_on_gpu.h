// Ranks that are threads, each with a stream of its own on the one GPU.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>

#include "runtime/transport/staged_transport.h"
#include "tests/gpu/on_gpu.h"
#include "tests/support/loopback_world.h"
#include "tests/support/own_stream.h"

namespace smp::tests {

/// by_the_host: messages go as transports move them that know no device.
inline void run_on_gpu(int num_ranks, bool by_the_host, const std::function<void(runtime::Transport&)>& body) {
  run_ranks(num_ranks, [&](runtime::Transport& transport) {
    const OwnStream stream;
    const std::shared_ptr<runtime::Transport> borrowed(std::shared_ptr<void>(), &transport);
    by_the_host ? body(*runtime::make_staged(borrowed)) : body(transport);
  });
}

inline std::string way_name(const testing::TestParamInfo<bool>& way) { return way.param ? "ByTheHost" : "OnTheDevice"; }

}  // namespace smp::tests
